"""The page's one style sheet, and the header that allows it and nothing else."""

from __future__ import annotations

import base64
import hashlib

STYLE = """
:root { color-scheme: light dark; --paper: #fff; --soft: #f3f5f8; --ink: #16202c; --quiet: #52606f; --line: #c9d1da;
  --accent: #0b5cad; --on-accent: #fff; --bad: #b3261e; --good: #1b6e3c; --prompt: #1d5a9e; --answer: #6496cd;
  --compact: #8a5a00; --restart: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --paper: #12171d; --soft: #1b222b; --ink: #e6ebf1; --quiet: #a3b0be;
  --line: #3a4653; --accent: #7db7f5; --on-accent: #0d1720; --bad: #ff9a90; --good: #7fd6a0; --prompt: #5b9be0;
  --answer: #3d6fa3; --compact: #f0b95a; --restart: #ff9a90; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 1rem/1.5 system-ui, sans-serif; }
header, main, footer { max-width: 76rem; margin: 0 auto; padding: 0 1rem; }
header { display: flex; flex-wrap: wrap; gap: .5rem 1.5rem; align-items: center; justify-content: space-between;
  padding-top: 1rem; }
h1 { font-size: 1.4rem; margin: 0; }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
h3 { font-size: 1rem; margin: 0; overflow-wrap: anywhere; }
p { margin: .25rem 0 .75rem; }
.quiet { color: var(--quiet); font-size: .9rem; }
.who { display: flex; flex-wrap: wrap; gap: .5rem 1rem; align-items: center; }
.notice { border-left: .3rem solid var(--accent); background: var(--soft); padding: .6rem .9rem; margin: .75rem 0;
  overflow-wrap: anywhere; }
.notice.problem { border-color: var(--bad); }
.notice.done { border-color: var(--good); }
.fields { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 22rem), 1fr)); gap: .75rem; }
.field { background: var(--soft); border: 1px solid var(--line); border-radius: .5rem; padding: .75rem .9rem; margin: 0;
  min-width: 0; }
.field.changed { border-color: var(--accent); }
label { display: block; font-weight: 600; }
.field p { margin: .25rem 0 0; font-size: .875rem; color: var(--quiet); overflow-wrap: anywhere; }
.field p.bad { color: var(--bad); font-weight: 600; }
.field p.note { color: var(--ink); }
select, input { font: inherit; width: 100%; max-width: 100%; margin-top: .3rem; padding: .4rem .5rem; color: var(--ink);
  background: var(--paper); border: 1px solid var(--quiet); border-radius: .35rem; }
[aria-invalid] { border: 2px solid var(--bad); }
button { font: inherit; padding: .4rem .9rem; border-radius: .35rem; border: 1px solid var(--accent); cursor: pointer;
  background: var(--paper); color: var(--accent); }
button.main { background: var(--accent); color: var(--on-accent); }
button.small { padding: .1rem .6rem; font-size: .875rem; margin-top: .4rem; }
.who button.small { margin: 0; }
:focus-visible { outline: 3px solid var(--accent); outline-offset: 2px; }
.actions { display: flex; flex-wrap: wrap; gap: .75rem; margin: 1rem 0 0; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: .5rem; }
table { border-collapse: collapse; width: 100%; min-width: 52rem; font-size: .9rem; }
th, td { text-align: left; padding: .4rem .7rem; border-bottom: 1px solid var(--line); vertical-align: top; }
th { background: var(--soft); white-space: nowrap; }
tbody th { background: none; font-weight: 600; white-space: normal; }
tbody th, td.name { min-width: 9rem; max-width: 22rem; }
tbody th { min-width: 13rem; }
tr:last-child > * { border-bottom: 0; }
td { min-width: 4rem; }
th.number { text-align: right; }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.time { white-space: nowrap; }
bdi { overflow-wrap: anywhere; }
.bad { color: var(--bad); }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 24rem), 1fr)); gap: 1rem; }
.plot { border: 1px solid var(--line); border-radius: .5rem; padding: .75rem; margin: 0; min-width: 0; }
.plot svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--quiet); font: 11px system-ui, sans-serif; }
@media (max-width: 30rem) { svg text { font-size: 13px; } }
.bar { fill: var(--prompt); } .more { fill: var(--answer); }
.rule { stroke: var(--quiet); stroke-width: 1; stroke-dasharray: 5 4; }
.full { stroke: var(--bad); stroke-width: 1.5; stroke-dasharray: none; }
.base { stroke: var(--line); }
.client { fill: none; stroke: var(--quiet); stroke-width: 1.5; stroke-dasharray: 1 3; stroke-linecap: round; }
.compact { fill: var(--compact); stroke: var(--compact); } .restart { fill: var(--restart); stroke: var(--restart); }
.legend { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; list-style: none; padding: 0; margin: .5rem 0 0;
  font-size: .875rem; }
.legend svg { width: 1.1rem; height: .9rem; margin-right: .35rem; vertical-align: -1px; }
footer { padding: 2rem 1rem; }
.narrow { max-width: 26rem; margin: 15vh auto 0; padding: 0 1rem; }
"""

_DIGEST = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
SECURITY_HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; style-src 'sha256-{_DIGEST}'; form-action 'self'; "
    "frame-ancestors 'none'; base-uri 'none'",
    "Cache-Control": "no-store",
    # `no-referrer` would make browsers send `Origin: null` with forms, and sessions.py compares it.
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
