"""Tiny GGUF files for tests, written with the `gguf` package."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter
from numpy.typing import NDArray

from headrace.quants import TYPES, TensorType, random_blocks


def raw_tensor(type: TensorType, shape: tuple[int, ...], seed: int = 0, scale: float = 0.05) -> NDArray[np.uint8]:
    """Random valid blocks as the file holds them, uint8 [..., bytes of a row]."""
    rng = np.random.default_rng(seed)
    blocks = random_blocks(type, int(np.prod(shape)) // type.block, rng, scale)
    return blocks.reshape(*shape[:-1], type.row_bytes(shape[-1]))


def write_gguf(
    path: Path,
    tensors: Mapping[str, tuple[str, tuple[int, ...]]],
    metadata: Mapping[str, Any] = {},
    *,
    architecture: str = "llama",
    alignment: int = 32,
    split_max_tensors: int = 0,
) -> dict[str, NDArray[np.uint8]]:
    """Writes tensors given as name -> (type, shape) with random contents, which it returns; the metadata's types
    follow from numpy scalars and arrays. A split set is written beside `path` as NAME-00001-of-0000N.gguf."""
    writer = GGUFWriter(path, architecture, split_max_tensors=split_max_tensors)
    if alignment != 32:
        writer.add_custom_alignment(alignment)
    for key, value in metadata.items():
        add_value(writer, key, value)
    written = {}
    for i, (name, (type_name, shape)) in enumerate(tensors.items()):
        raw = written[name] = raw_tensor(TYPES[type_name], shape, seed=i)
        if type_name in ("F32", "F16"):
            writer.add_tensor(name, raw.view("<f4" if type_name == "F32" else "<f2"))
        else:
            writer.add_tensor(name, raw, raw_dtype=GGMLQuantizationType[type_name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


SCALARS = {
    "uint8": GGUFValueType.UINT8, "int8": GGUFValueType.INT8, "uint16": GGUFValueType.UINT16,
    "int16": GGUFValueType.INT16, "uint32": GGUFValueType.UINT32, "int32": GGUFValueType.INT32,
    "uint64": GGUFValueType.UINT64, "int64": GGUFValueType.INT64, "float32": GGUFValueType.FLOAT32,
    "float64": GGUFValueType.FLOAT64, "bool": GGUFValueType.BOOL, "int": GGUFValueType.UINT32,
    "float": GGUFValueType.FLOAT32, "str": GGUFValueType.STRING,
}  # fmt: skip


def add_value(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, np.ndarray):
        writer.add_key_value(key, value.tolist(), GGUFValueType.ARRAY, SCALARS[value.dtype.name])
    elif isinstance(value, list):
        writer.add_array(key, value)
    else:
        writer.add_key_value(key, value, SCALARS[type(value).__name__])
