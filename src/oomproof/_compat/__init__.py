"""Everything of Keras and the frameworks that nobody promised us: private names, patches, the versions they are for.

Nothing else in oomproof names what is private in one of them. A module here imports the framework it is named for, so
it is imported where that framework is needed; `patches`, `versions` and `names` import none.
"""
