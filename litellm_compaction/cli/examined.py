"""One deployment as `doctor` has found it, and what there is to say about it in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches

from litellm_compaction.cli.config_file import Section
from litellm_compaction.cli.findings import Finding, entry_section, note
from litellm_compaction.cli.probing import Probe
from litellm_compaction.core.continuation.request import Way
from litellm_compaction.proxy.routing import Deployment
from litellm_compaction.tokenizers.registry import usable_soon, why_broken
from litellm_compaction.tokenizers.sources import Kind, TokenizerSource
from litellm_compaction.windows.lmstudio import Listing
from litellm_compaction.windows.other_servers import SERVERS, Served
from litellm_compaction.windows.windows import Target, Window

_WORDS: Mapping[Kind, str] = {
    "operator": "{}, as the operator wrote",
    "lm_studio_file": "LM Studio's file {}",
    "server_file": "the server's own file {}",
    "pack": "{}, the model's own from this package",
    "stand_in": "{}, a stand-in that errs high until calibrated by usage",
    "heuristic": "four characters a token, as the operator wrote",
}


def tokenizer_name(source: TokenizerSource) -> str:
    """The file, or the name of the vocabulary."""
    return str(source.path) if source.path is not None else source.family.vocabulary


def source_words(source: TokenizerSource) -> str:
    """Where the vocabulary comes from, and what is to be thought of it."""
    return _WORDS[source.kind].format(tokenizer_name(source))


def template_words(source: TokenizerSource) -> str:
    """How the tokens around the texts are known."""
    if source.template == "formula":
        return "estimated by a formula"
    if source.template == "file" and source.path is None:
        return "the one that LM Studio says is in effect"
    return "the file's own" if source.template == "file" else f"{source.family.template}, from this package"


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """One deployment, or one loaded model behind a wildcard.

    Attributes:
        name: its `model_name`; model: as the server is asked for it.
        guarded: None where nobody could be asked.
        why: the reason for `guarded`, in words.
        server: its address without credentials; "" where it was not asked.
        reachable, loaded: None where it was not asked, or nobody knows.
        api: version of LM Studio's API; "" where it was not asked.
        tokenizer: the vocabulary or file that counts; exact says whether it is the model's own.
        tokenizer_source: its kind, as in `tokenizers/sources.py`; tokenizer_words and template_words are for people.
        model_settings: how LM Studio's own settings have the model answer; "" where it was not asked.
        probes: our count against the server's, where that was wanted.
        carrier: what carries a running answer over the limit; "" where nothing does.
        ways: in which its server is made to go on with an answer, best first; those that it has refused are left out.
        gone_on: of these, what it has shown that it does.
    """

    name: str
    model: str
    guarded: bool | None
    why: str
    server: str = ""
    reachable: bool | None = None
    api: str = ""
    loaded: bool | None = None
    window_tokens: int | None = None
    window_source: str = ""
    parallel: int | None = None
    architecture: str = ""
    family: str = ""
    tokenizer: str = ""
    tokenizer_exact: bool | None = None
    tokenizer_source: str = ""
    tokenizer_words: str = ""
    template_words: str = ""
    model_settings: str = ""
    probes: tuple[Probe, ...] = ()
    carrier: str = ""
    ways: tuple[Way, ...] = ()
    gone_on: tuple[Way, ...] = ()

    @property
    def place(self) -> str:
        """Its name in findings, with the model where a wildcard has several."""
        return f"{self.name} → {self.model}" if "*" in self.name and "*" not in self.model else self.name


def names(target: Target, served: Served | None) -> list[str]:
    """The models to describe: the deployment's own, or what is loaded behind a wildcard."""
    loaded = [model.names[0] for model in served.models if model.names] if served else []
    return loaded if loaded and "*" in target.model else [target.model]


def about_window(row: Examined, target: Target, window: Window, served: Served | None) -> list[Finding]:
    """What to know of an opted-in deployment's window, and what to do where nobody knows it."""
    findings: list[Finding] = []
    write = "write model_info.compaction.context_length"
    if served is not None and window.source not in SERVERS and not target.asked_tokens:
        server = SERVERS[served.api] if served.api is not None else None
        if server is not None and server.loads_on_request:
            load = "it is read when the first request has loaded it"
            what = f"{server.title} has not loaded {target.model}"
            until = f"so {window.tokens:,} tokens ({window.source}) count until then"
            surely = f" To be sure, set {server.window_parameter} in litellm_params." if server.window_parameter else ""
            findings.append(note(row.name, f"{what}, {until}; {load}.{surely}"))
        elif window.source != "operator":
            asked = ", ".join(SERVERS[api].path for api in target.apis)
            findings.append(note(row.name, f"its server tells no window ({asked}): {write}."))
    if window.source == "default":
        findings.append(note(row.name, f"its window is assumed to be {window.tokens:,} tokens: {write}."))
    if window.slots > window.parallel:
        text = f"{window.slots} requests at a time have this window each; if they share it (--kv-unified), write"
        findings.append(note(row.name, f"{text} `admission: pool`."))
    return findings


async def in_use(source: TokenizerSource) -> tuple[TokenizerSource, list[str]]:
    """The source with its vocabulary loaded, or what stands in for it, and what is wrong then; 0.1–2 s in a thread."""
    planned = source.family
    family = await usable_soon(planned)
    if family.vocabulary != planned.vocabulary:
        failure = why_broken(planned.vocabulary) or f"The vocabulary {planned.vocabulary} cannot be loaded."
        return replace(source, kind="stand_in", family=family, path=None), [
            f"{failure} {family.vocabulary} counts meanwhile."
        ]
    if family.template != planned.template:
        failure = f"The chat template {planned.template} cannot be read: reinstall litellm-compaction."
        return replace(source, family=family), [f"{failure} A formula counts meanwhile."]
    return source, []


def with_source(row: Examined, architecture: str, source: TokenizerSource) -> Examined:
    """The row with what counts its prompts, once that is loaded."""
    return replace(
        row,
        architecture=architecture,
        family=source.family.name,
        tokenizer=tokenizer_name(source),
        tokenizer_exact=source.family.exact,
        tokenizer_source=source.kind,
        tokenizer_words=source_words(source),
        template_words=template_words(source),
    )


def why_not(deployment: Deployment, entry: Section) -> str:
    """The reason for which a deployment is not guarded, as long as nobody was asked."""
    if deployment.settings.enabled is False:
        return "model_info.compaction.enabled is false"
    model = str(entry_section(entry, "litellm_params").get("model", ""))
    if model.startswith("openai/") and deployment.target.api_base:
        return "its server is not in a local network, so it is not asked; opt in with model_info.compaction.enabled"
    return "its provider is not LM Studio; opt in with model_info.compaction.enabled"


def closest(model: str, listing: Listing) -> str:
    """The end of a sentence: what LM Studio has that is called like `model`."""
    keys = [listed.key for listed in listing.models if listed.kind == "llm"]
    near = get_close_matches(model, keys, n=3, cutoff=0.3) or keys[:3]
    return f"; LM Studio has {', '.join(near)}" if near else "; LM Studio has no chat model"


def without_credentials(api_base: str) -> str:
    """The address without a user and a password in it."""
    scheme, separator, rest = api_base.partition("://")
    authority, slash, path = rest.partition("/")
    return f"{scheme}{separator}{authority.rpartition('@')[2]}{slash}{path}" if separator else api_base
