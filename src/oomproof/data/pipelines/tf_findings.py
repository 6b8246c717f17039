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
                "from_generator runs Python one element at a time; memory of the generator itself is not counted.",
                "a generator that reads files or slices as it goes and keeps nothing",
            )
    yield from _dtypes(nodes, books)
    if books.settings.rewrites:
        yield from _sources(end, books)


def _unknown(nodes: list[Node], sizes: dict[int, int | None]) -> Iterator[Finding]:
    for node in nodes:
        if sizes.get(id(node.dataset), 0) is None:
            if node.kind == "cache":
                fix = "dataset.apply(tf.data.experimental.assert_cardinality(n)) before it, to tell its length"
            else:
                fix = "a fixed shape (tf.ensure_shape)"
            yield Finding("note", node.name, f"The memory of {node.name} is unknown and not counted.", fix)


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
                "prefetch comes before batch: samples are made ahead, but the model still waits for batches.",
                "dataset.prefetch(tf.data.AUTOTUNE) at the end",
            )
        else:
            yield Finding(
                "warning",
                "no prefetch",
                "No prefetch at the end: the model waits for each batch.",
                "dataset = dataset.prefetch(tf.data.AUTOTUNE)",
            )
    if len(batches) > 1 and not any(node.kind in ("unbatch", "flat_map", "unknown") for node in nodes):
        yield Finding(
            "problem",
            "batch applied twice",
            f"{' and then '.join(node.name for node in batches)}: samples get two batch dimensions.",
            "Remove one of them; image_dataset_from_directory and the like already return batches.",
        )
    if batch_size is not None and batches and batches[-1].number("_batch_size") != batch_size:
        yield Finding(
            "note",
            "batch size",
            f"The pipeline makes batches of {batches[-1].number('_batch_size')}, not of {batch_size}.",
        )


def _cache(
    node: Node, below: list[Node], above: list[Node], size: int | None, available: int | None
) -> Iterator[Finding]:
    frozen = [each for each in below if each.kind == "map" and each.function and each.function.is_random]
    if frozen:
        yield Finding(
            "problem",
            "cache before a random augmentation",
            "A map before the cache draws random numbers: every epoch repeats those of the first.",
            "dataset.cache() first, then .map(augment).",
        )
    if any(each.kind == "shuffle" for each in below) and any(
        bool(getattr(each.dataset, "_reshuffle_each_iteration", False)) for each in below if each.kind == "shuffle"
    ):
        yield Finding(
            "warning",
            "cache after shuffle",
            "A shuffle before the cache: every epoch repeats the order of the first.",
            "dataset.cache() first, then .shuffle(…).",
        )
    if any(each.kind in _BATCHES for each in below) and not any(each.kind in ("unbatch",) for each in below):
        yield Finding(
            "note",
            "cache after batch",
            "Batches are cached, not samples: every epoch has the same batches.",
            "dataset.cache().shuffle(…).batch(…)",
        )
    if node.on_disk or size is None or available is None:
        return
    if size > available:
        count = node.inputs[0].cardinality
        yield Finding(
            "problem",
            "cache larger than memory",
            f"{node.name} holds {count} elements, {format_bytes(size)}; {format_bytes(available)} of RAM are free.",
            'dataset = oomproof.data.tune(dataset)  # or .cache("a file on disk"), or no cache',
        )


def _shuffle(
    node: Node, below: list[Node], books: Accounts, size: int | None, available: int | None
) -> Iterator[Finding]:
    buffered, count = node.number("_buffer_size"), node.inputs[0].cardinality
    if size is not None and available is not None and size > available:
        yield Finding(
            "problem",
            "shuffle buffer larger than memory",
            f"{node.name} holds {format_bytes(size)}; {format_bytes(available)} of RAM are free.",
            "Shuffle paths or indices before reading and decoding, or: dataset = oomproof.data.tune(dataset)",
        )
    maps = [each for each in below if each.kind == "map" and each.function and each.function.is_pure]
    if size is not None and size > _WORTH_IT and maps and node.inputs[0].kind == "map":
        smaller = books.size(maps[0].inputs[0])
        if smaller * 2 < books.size(node.inputs[0]):
            yield Finding(
                "note",
                "shuffle after map",
                f"The buffer holds elements after the map, {format_bytes(books.size(node.inputs[0]))} each; before the "
                f"map they take {format_bytes(smaller)}.",
                "Shuffle before the map: the order stays the same. oomproof.data.tune does it.",
            )
    whole = max((each.cardinality for each in below if each.kind in ("tensor_slices", "range")), default=-1)
    count = count if count >= 0 else whole
    if any(each.kind in _BATCHES for each in below):
        yield Finding(
            "warning",
            "shuffle after batch",
            "Batches are shuffled, not samples: every epoch has the same batches.",
            "dataset.shuffle(…).batch(…)",
        )
    elif count > 0 and buffered * 20 < count:
        yield Finding(
            "warning",
            "shuffle buffer smaller than useful",
            f"A buffer of {buffered} for {count} elements: late elements stay late in the epoch.",
            "a buffer as large as the data; of paths or indices if samples are large",
        )


def _parallel(node: Node) -> Iterator[Finding]:
    if node.parallel_calls is not None:
        return
    if node.kind == "map" and node.function is not None and not node.function.is_pure:
        why = "calls Python" if node.function.calls_python else "has state (random numbers, variables)"
        yield Finding(
            "note",
            "map not parallel",
            f"A map runs one call at a time. Its function {why}, so parallel calls would change its results.",
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
        "tf.io.decode_jpeg(data, ratio=2), or 4 or 8, for much larger JPEGs; oomproof.data.from_files does it.",
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
            f"The pipeline holds {format_bytes(sources)} of tensors in addition to the arrays they come from, and "
            "TensorFlow copies them once more when iteration starts.",
            "oomproof.data.tune avoids that copy; oomproof.data.from_arrays streams arrays without copies.",
        )
