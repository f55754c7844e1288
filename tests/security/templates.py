"""Hostile chat templates: those that found a way past the sandbox's limits, and those that did not, to go on so."""

# ruff: noqa: E501 - a row is a line

from __future__ import annotations


def _grown(start: str, step: str, *, times: int = 60, end: str = "x") -> str:
    """`x` begins as `start` and becomes `step` again and again."""
    return f"{{% set ns = namespace(x={start}) %}}{{% for i in range({times}) %}}{{% set ns.x = {step} %}}{{% endfor %}}{end}"


# Without a limit on the process each of these takes a processor, or all memory, for minutes or for ever.
UNBOUNDED: dict[str, str] = {
    "squares": _grown("9", "ns.x * ns.x", end="{{ ns.x > 1 }}"),
    "squares that are written": _grown("9", "ns.x * ns.x", end="{{ ns.x }}"),
    "product of a loop": "{% set ns = namespace(x=10**1) %}" + _grown("99999999999", "ns.x * ns.x * ns.x", times=30),
    "division of giants": _grown("9", "ns.x * ns.x", times=26, end="{{ ns.x // 7 * (ns.x // 3) // 11 }}"),
    "twice nested, as JSON": _grown("1", "[ns.x, ns.x]", end="{{ ns.x | tojson }}"),
    "twice nested, written": _grown("1", "[ns.x, ns.x]", end="{{ ns.x }}"),
    "twice nested dicts": _grown("1", "{'a': ns.x, 'b': ns.x}", end="{{ ns.x | tojson }}"),
    "twice nested, compared": "{% set a = namespace(x=1) %}{% set b = namespace(x=1) %}{% for i in range(60) %}"
    "{% set a.x = [a.x, a.x] %}{% set b.x = [b.x, b.x] %}{% endfor %}{{ a.x == b.x }}",
    "twice nested, hashed": _grown("1", "(ns.x, ns.x)", end="{{ {ns.x: 1} | length }}"),
    "twice nested, sorted": _grown("1", "[ns.x, ns.x]", end="{{ [ns.x, ns.x] | sort }}"),
    "JSON of JSON": _grown("'\\\\\"'", "ns.x | tojson", times=80, end="{{ ns.x | length }}"),
    "slices": "{{ [1] | slice(1000000000) | list | length }}",
    "batches": "{{ [1] | batch(1000000000, 'x') | list | length }}",
    "filled batches": "{% for a in range(9) | batch(500000000, 'x') %}{{ a | length }}{% endfor %}",
    "a macro that calls itself twice": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(90) }}",
    "lorem ipsum": "{{ lipsum(n=100000000) }}",
    "sums of ranges": "{{ ([range(99999)] * 99999) | map('sum') | list | length }}",
    "sums of lists": _grown("[1]", "ns.x + ns.x"),
    "sum of lists": "{{ ([[1] * 99999] * 99999) | sum(start=[]) | length }}",
    "translated": "{% set t = 'x' * 99999 %}" + _grown("t", "ns.x.translate({120: t})", end="{{ ns.x | length }}"),
    "bytes of a number": "{% set n = 1 %}{{ n.to_bytes(1000000000) | length }}",
    "encoded text": "{% set t = 'x' * 99999 %}{% for i in range(99999) %}{{ ([t] * 999) | join('') | wordcount }}{% endfor %}",
    "dicts of dicts": _grown("{'a': 1}", "dict(ns.x, b=dict(ns.x, c=ns.x))", end="{{ ns.x }}"),
    "a joiner in loops": "{% for a in range(99999) %}{% for b in range(99999) %}{{ a }}{% endfor %}{% endfor %}",
    "a recursive loop": "{% for a in [[1]] recursive %}{{ loop([a, a]) }}{{ loop([a, a]) }}{% endfor %}",
    "a cycle": "{% set c = cycler(*range(99999)) %}{% for a in range(99999) %}{% for b in range(99999) %}{{ c.next() }}{% endfor %}{% endfor %}",
    "a long block": "{% macro m() %}{{ 'x' * 99999 }}{% endmacro %}{% for a in range(99999) %}{% set x = m() ~ m() %}{% endfor %}",
}
# Held before, inside the sandbox: refused at once, or bounded.
HELD: dict[str, str] = {
    "dunder": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "dunder by a key": "{{ ''['__class__'] }}",
    "dunder in parts": "{{ ''['__cla' ~ 'ss__'] }}",
    "globals of a function": "{{ raise_exception.__globals__ }}",
    "globals of a cycler": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "self": "{{ self.__init__.__globals__ }}",
    "format": "{{ '{0.__class__}'.format(1) }}",
    "format_map": "{{ '{a.__class__}'.format_map({'a': 1}) }}",
    "percent": "{{ '%999999999d' % 1 }}",
    "power": "{{ 9 ** 9 ** 9 }}",
    "long text": "{{ 'x' * 9999999999 }}",
    "wide JSON": "{{ [1] | tojson(indent=9999999999) }}",
    "replaced": _grown("'xx'", "ns.x | replace('x', 'xx')", end="{{ ns.x | length }}"),
    "sum of texts": _grown("'xx'", "ns.x + ns.x", end="{{ ns.x | length }}"),
    "long range": "{% for i in range(9999999999) %}x{% endfor %}",
    "include": "{% include '/etc/passwd' %}",
    "mutation": "{{ messages.append(1) }}",
    "mutation of a message": "{{ messages[0].update({'role': 'system'}) }}",
    "deep brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "no end": "{% for",
    "long": "x" * 300_000,
    "the sandbox's own name": "{{ turn_of_a_loop }}",
    "exception": "{{ raise_exception('no') }}",
    "half surrogates": "{{ '\ud800' }}",
}
