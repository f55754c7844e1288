"""`litellm-compaction doctor`: is this config file going to do what its author expects?"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from litellm_compaction.cli.config_file import ConfigFile, read_config, shipped_config
from litellm_compaction.cli.examination import examine
from litellm_compaction.cli.examined import Examined
from litellm_compaction.cli.findings import Finding, config_findings
from litellm_compaction.engine import Standing
from litellm_compaction.events import harmless

_HERE = Path("config.yaml")
_SOURCES = {
    "llama.cpp": "llama.cpp's /props",
    "vllm": "vLLM's max_model_len",
    "ollama": "Ollama's /api/ps",
    "operator": "the config file",
    "max_input_tokens": "model_info.max_input_tokens",
    "model_map": "LiteLLM's model map",
    "default": "an assumption",
}


def doctor(*, config: Path | None, as_json: bool, environ: Mapping[str, str], probes: bool = False) -> int:
    """Prints the report; 0 when there is no problem, else 1.

    Args:
        config: None is config.yaml in the current folder if there is one, else the shipped one.
        probes: loaded models are sent two tiny requests, whose tokens are compared with our count.

    Raises:
        ConfigError: the file cannot be read.
    """
    file = read_config(config or (_HERE if _HERE.is_file() else shipped_config()))
    from_file = config_findings(file, environ)
    rows, from_servers = asyncio.run(examine(file, environ, probes=probes))
    findings = (*from_file, *from_servers)
    has_problem = any(finding.level == "problem" for finding in findings)
    if as_json:
        print(json.dumps(_report(file, rows, findings, has_problem), indent=2, ensure_ascii=False))
    else:
        print("\n".join(map(harmless, _lines(file, rows, findings))))
    return 1 if has_problem else 0


def _report(
    file: ConfigFile, rows: Sequence[Examined], findings: Sequence[Finding], has_problem: bool
) -> dict[str, object]:
    return {
        "config": str(file.path),
        "ok": not has_problem,
        "deployments": [asdict(row) for row in rows],
        "findings": [asdict(finding) for finding in findings],
    }


def _lines(file: ConfigFile, rows: Sequence[Examined], findings: Sequence[Finding]) -> Iterator[str]:
    yield f"config   {file.path}"
    for row in rows:
        yield ""
        yield row.name if row.name.partition("/")[2] == row.model else f"{row.name} → {row.model or '?'}"
        yield f"  guarded  {'not known' if row.guarded is None else 'yes' if row.guarded else 'no'}: {row.why}"
        if row.server:
            named = f"LM Studio's API {row.api}" if row.api in ("v0", "v1") else row.api
            api = f", {named}" if named else ""
            yield f"  server   {row.server}, {'reachable' if row.reachable else 'not reachable'}{api}"
        if row.window_tokens is not None:
            shared = f", shared by up to {row.parallel} requests" if (row.parallel or 1) > 1 else ""
            source = _SOURCES.get(row.window_source, row.window_source)
            yield f"  window   {row.window_tokens:,} tokens, from {source}{shared}"
        elif row.loaded is False:
            yield "  window   not known: not loaded"
        if row.tokenizer:
            architecture = f" (architecture {row.architecture})" if row.architecture else ""
            yield f"  counting as {row.family}{architecture} with {row.tokenizer_words}; template: {row.template_words}"
        for found in row.probes:
            off = found.counted_tokens / found.server_tokens - 1
            tools = "with tools" if found.tools else "without tools"
            by_us, by_server = f"{found.counted_tokens} tokens by us", f"{found.server_tokens} by the server"
            yield f"  probe    {tools}: {by_us}, {by_server} ({off:+.1%})"
        if row.carrier:
            how = "below LiteLLM's OpenAI client" if row.carrier == "transport" else "by LiteLLM's hooks"
            yield f"  carrier  {row.carrier}: running answers are carried over the limit {how}"
        if goes_on := Standing(row.ways, row.gone_on).in_words():
            yield f"  goes on  {goes_on}"
    for level, title in (("problem", "Problems"), ("note", "Notes")):
        some = [finding for finding in findings if finding.level == level]
        if some:
            yield ""
            yield f"{title}:"
            yield from (f"  {'✗' if level == 'problem' else '·'} {found.place}: {found.message}" for found in some)
    yield ""
    count = sum(finding.level == "problem" for finding in findings)
    yield "No problems found." if not count else f"{count} problem{'s' if count > 1 else ''} found."
