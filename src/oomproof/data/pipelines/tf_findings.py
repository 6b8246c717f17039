"""What could be better about a tf.data pipeline, with what to do."""

from __future__ import annotations

from collections.abc import Iterator

from oomproof._records.diagnosis import Finding
from oomproof._records.units import format_bytes
from oomproof.data.audit_record import Stage
from oomproof.data.pipelines.tf_memory import Accounts
from oomproof.data.pipelines.tf_stages import Node, walk

# What is smaller than this is not worth a word.
_WORTH_IT = 2**20
_BATCHES = ("batch", "padded_batch")


def findings(
    end: Node, books: Accounts, stages: list[Stage], available: int | None, batch_size: int | None
) -> Iterator[Finding]:
    """Looks at a pipeline.

    Args:
        end: Where it ends.
        books: What its stages hold.
        stages: The same as it is told.
        available: RAM that is free, where that is known.
        batch_size: What it is going to be batched by, if somebody said so.
    """
    nodes = list(walk(end))
    sizes = {id(node.dataset): stage.bytes for node, stage in zip(nodes, stages, strict=False)}
    yield from _unknown(nodes, sizes)
    yield from _end(end, nodes, batch_size)
    for node in nodes:
        below = list(walk(node))[:-1]
        above = nodes[nodes.index(node) + 1 :]
        if node.kind == "cache":
            yield from _cache(node, below, above, sizes[id(node.dataset)], available)
        if node.kind == "shuffle":
            yield from _shuffle(node, below, books, sizes[id(node.dataset)], available)
        if node.kind in ("map", "interleave"):
            yield from _parallel(node)
        if node.kind == "map" and node.function and node.function.decodes_and_resizes:
            yield from _decoding(node)
        if node.kind == "generator":
            yield Finding(
                "note",
                "generator",
                "from_generator runs Python, one element at a time; what the generator itself holds cannot be seen.",
                "A generator that reads as it goes, from files or slices, and keeps nothing.",
            )
    yield from _dtypes(nodes, books)
    if books.settings.rewrites:
        yield from _sources(end, books)


def _unknown(nodes: list[Node], sizes: dict[int, int | None]) -> Iterator[Finding]:
    for node in nodes:
        if sizes.get(id(node.dataset), 0) is None:
            if node.kind == "cache":
                fix = "dataset.apply(tf.data.experimental.assert_cardinality(n)) before it says how many there are."
            else:
                fix = "Give it a fixed shape (tf.ensure_shape), or count it yourself."
            yield Finding("note", node.name, f"What {node.name} holds is not known and not counted.", fix)


def _end(end: Node, nodes: list[Node], batch_size: int | None) -> Iterator[Finding]:
    last = end
    while last.kind in ("options", "pass", "repeat", "take") and last.inputs:
        last = last.inputs[0]
    prefetches = [node for node in nodes if node.kind == "prefetch"]
    batches = [node for node in nodes if node.kind in _BATCHES]
    if last.kind != "prefetch":
        if prefetches and batches and any(node in walk(batches[0]) for node in prefetches):
            yield Finding(
                "warning",
                "prefetch before batch",
                "prefetch stands before batch: samples are made ahead, and the model still waits for its batches.",
                "Put .prefetch(tf.data.AUTOTUNE) at the end.",
            )
        else:
            yield Finding(
                "warning",
                "no prefetch",
                "No prefetch at the end: the model waits while a batch is made.",
                "dataset = dataset.prefetch(tf.data.AUTOTUNE)",
            )
    if len(batches) > 1 and not any(node.kind in ("unbatch", "flat_map", "unknown") for node in nodes):
        yield Finding(
            "problem",
            "batch applied twice",
            f"{' and then '.join(node.name for node in batches)}: samples get two batch dimensions.",
            "Take one of them out; image_dataset_from_directory and its kin return batches already.",
        )
    if batch_size is not None and batches and batches[-1].number("_batch_size") != batch_size:
        yield Finding(
            "note",
            "batch size",
            f"The pipeline makes batches of {batches[-1].number('_batch_size')}, and not of {batch_size}.",
        )


def _cache(
    node: Node, below: list[Node], above: list[Node], size: int | None, available: int | None
) -> Iterator[Finding]:
    frozen = [each for each in below if each.kind == "map" and each.function and each.function.is_random]
    if frozen:
        yield Finding(
            "problem",
            "cache before a random augmentation",
            "A map before the cache draws random numbers: what the first epoch drew is kept for all of them.",
            "dataset.cache() first, then .map(augment).",
        )
    if any(each.kind == "shuffle" for each in below) and any(
        bool(getattr(each.dataset, "_reshuffle_each_iteration", False)) for each in below if each.kind == "shuffle"
    ):
        yield Finding(
            "warning",
            "cache after shuffle",
            "A shuffle before the cache: the order of the first epoch is kept for all of them.",
            "dataset.cache() first, then .shuffle(…).",
        )
    if any(each.kind in _BATCHES for each in below) and not any(each.kind in ("unbatch",) for each in below):
        yield Finding(
            "note",
            "cache after batch",
            "Batches are cached and not samples: the same samples are together in every epoch.",
            "dataset.cache().shuffle(…).batch(…)",
        )
    if node.on_disk or size is None or available is None:
        return
    if size > available:
        count = node.inputs[0].cardinality
        yield Finding(
            "problem",
            "cache larger than memory",
            f"{node.name} will hold {count} elements, {format_bytes(size)}; {format_bytes(available)} of RAM are free.",
            'dataset = oomproof.data.tune(dataset)  # or .cache("a file on disk"), or none',
        )


def _shuffle(
    node: Node, below: list[Node], books: Accounts, size: int | None, available: int | None
) -> Iterator[Finding]:
    buffered, count = node.number("_buffer_size"), node.inputs[0].cardinality
    if size is not None and available is not None and size > available:
        yield Finding(
            "problem",
            "shuffle buffer larger than memory",
            f"{node.name} will hold {format_bytes(size)}, and {format_bytes(available)} of RAM are free.",
            "Shuffle paths or indices before they are read and decoded, or: dataset = oomproof.data.tune(dataset)",
        )
    maps = [each for each in below if each.kind == "map" and each.function and each.function.is_pure]
    if size is not None and size > _WORTH_IT and maps and node.inputs[0].kind == "map":
        smaller = books.size(maps[0].inputs[0])
        if smaller * 2 < books.size(node.inputs[0]):
            yield Finding(
                "note",
                "shuffle after map",
                f"The buffer holds what the map has made, {format_bytes(books.size(node.inputs[0]))} each, and before "
                f"the map it is {format_bytes(smaller)}.",
                "Shuffle before the map: the order is the same. oomproof.data.tune does it.",
            )
    whole = max((each.cardinality for each in below if each.kind in ("tensor_slices", "range")), default=-1)
    count = count if count >= 0 else whole
    if any(each.kind in _BATCHES for each in below):
        yield Finding(
            "warning",
            "shuffle after batch",
            "Batches are shuffled and not samples: the same samples are together in every epoch.",
            "dataset.shuffle(…).batch(…)",
        )
    elif count > 0 and buffered * 20 < count:
        yield Finding(
            "warning",
            "shuffle buffer smaller than useful",
            f"A buffer of {buffered} for {count} elements: what comes late in the data comes late in the epoch.",
            "A buffer as large as the data, of paths or indices where samples are large.",
        )


def _parallel(node: Node) -> Iterator[Finding]:
    if node.parallel_calls is not None:
        return
    if node.kind == "map" and node.function is not None and not node.function.is_pure:
        why = "calls Python" if node.function.calls_python else "has state (random numbers, variables)"
        yield Finding(
            "note",
            "map not parallel",
            f"A map runs one call at a time. Its function {why}: parallel calls would change what an element gets.",
            "tf.random.stateless_… with a seed per element, and then num_parallel_calls=tf.data.AUTOTUNE",
        )
    else:
        yield Finding(
            "note",
            f"{node.kind} not parallel",
            f"{node.name} runs one call at a time unless TensorFlow's defaults make it parallel.",
            f"dataset.{node.kind}(…, num_parallel_calls=tf.data.AUTOTUNE)",
        )


def _decoding(node: Node) -> Iterator[Finding]:
    if node.function is not None and node.function.jpeg_ratio > 1:
        return
    yield Finding(
        "note",
        "images decoded at full size",
        "Images are decoded at full size and then resized.",
        "tf.io.decode_jpeg(data, ratio=2) (or 4, 8) for JPEGs that are much larger; oomproof.data.from_files does it.",
    )


def _dtypes(nodes: list[Node], books: Accounts) -> Iterator[Finding]:
    for node in nodes:
        held = node.kind in ("tensor_slices", "tensors", "cache", "shuffle", *_BATCHES)
        for part in (books.elements.at(node) or ()) if held else ():
            wide = {"float64": "float32", "int64": "int32", "complex128": "complex64"}.get(part.dtype)
            count = max(node.cardinality, 1) if node.kind in ("tensor_slices", "cache") else 1
            if wide and part.bytes * count >= _WORTH_IT:
                yield Finding(
                    "warning" if part.dtype == "float64" else "note",
                    f"{part.dtype} where smaller would do",
                    f"{node.name} has {format_bytes(part.bytes * count)} of {part.dtype}; models compute in float32.",
                    f'x = x.astype("{wide}")',
                )
                return


def _sources(end: Node, books: Accounts) -> Iterator[Finding]:
    sources = books.at(end).sources
    if sources >= 64 * _WORTH_IT:
        yield Finding(
            "note",
            "source tensors copied",
            f"The pipeline holds {format_bytes(sources)} of tensors beside the arrays they were made from, and "
            "TensorFlow copies them once more when iteration starts.",
            "oomproof.data.tune leaves that copy out; oomproof.data.from_arrays streams arrays without any.",
        )
