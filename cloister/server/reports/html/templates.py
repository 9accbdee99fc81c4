"""Templates of the pages, and their rendering."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from cloister.utils.text import clean, parts

if TYPE_CHECKING:
    from markupsafe import Markup


STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --soft: #f3f5f8; --ink: #1b2330; --muted: #4d5869; --line:
#c9d0da;
  --series-1: #1f5fae; --series-2: #a8480f; --series-3: #1c7a48; --series-4: #7a3fa0;
  --good: #13653a; --warn: #8a3b00; --link: #1f5fae; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14181f; --soft: #1d232d; --ink: #e6eaf0; --muted: #a9b3c1; --line: #3c4654;
    --series-1: #7db4f5; --series-2: #f0a367; --series-3: #7fd6a4; --series-4: #cf9ff0;
    --good: #7fd6a4; --warn: #ffb27a; --link: #8fbdf7; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, "Segoe UI", "DejaVu Sans",
sans-serif; }
.skip { position: absolute; left: -999rem; }
.skip:focus { left: 1rem; top: 1rem; background: var(--paper); padding: .5rem; }
header, nav, main, footer { max-width: 64rem; margin: 0 auto; padding: 0 1.5rem; }
header { padding-top: 2rem; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .3rem; overflow-wrap: anywhere; }
h2 { font-size: 1.3rem; margin: 0 0 .6rem; }
h3 { font-size: 1.02rem; margin: 1.3rem 0 .4rem; }
h4 { font-size: .95rem; margin: .9rem 0 .3rem; }
p { margin: 0 0 .6rem; }
a { color: var(--link); }
nav ul { display: flex; flex-wrap: wrap; gap: .2rem 1.5rem; list-style: none; padding: .6rem 0; margin: .8rem 0 0;
  border-top: 1px solid var(--line); border-bottom: 1px solid var(--line); }
section.page { padding: 1.6rem 0; border-bottom: 1px solid var(--line); }
.muted { color: var(--muted); }
.small { font-size: .88rem; }
.claim { border-left: .35rem solid var(--warn); background: var(--soft); padding: .8rem 1.1rem; margin: 0 0 1rem; }
.claim.sound { border-color: var(--good); }
.claim p { font-size: 1.12rem; margin-bottom: .45rem; }
.claim h3 { margin: 0 0 .4rem; color: var(--warn); }
.claim.sound h3 { color: var(--good); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
caption { position: sticky; left: 0; max-width: calc(100vw - 3rem); }
caption { text-align: left; color: var(--muted); padding: 0 0 .3rem; font-size: .88rem; }
th, td { text-align: left; vertical-align: top; padding: .25rem .6rem .25rem 0; border-bottom: 1px solid
var(--line); }
thead th { border-bottom: 2px solid var(--line); }
td.n, th.n { white-space: nowrap; text-align: right; font-variant-numeric: tabular-nums; }
th[scope=row] { font-weight: 600; }
code, .code { font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: .84em; overflow-wrap: anywhere; }
figure { margin: 0; }
figcaption { font-size: .88rem; color: var(--muted); margin-bottom: .2rem; }
svg { display: block; width: 100%; height: auto; stroke-linejoin: round; }
svg text { font-family: inherit !important; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(17rem, 1fr)); gap: 1.2rem 1.8rem; }
.two { display: grid; grid-template-columns: repeat(auto-fit, minmax(20rem, 1fr)); gap: 1rem 2rem; align-items:
start; }
.two > figure { max-width: 34rem; }
.columns { columns: 2; column-gap: 2rem; }
.columns p { margin: 0 0 .15rem; overflow-wrap: anywhere; break-inside: avoid; }
#claim th[scope=row], .classes thead th { white-space: nowrap; }
.classes th[scope=row], .classes td:last-child { max-width: 9rem; overflow-wrap: break-word; }
.runs th { white-space: normal; } .runs td, .runs tbody th { overflow-wrap: anywhere; }
.two.by-class { grid-template-columns: minmax(0, 3fr) minmax(0, 2fr); }
ul { margin: 0 0 .6rem; padding-left: 1.2rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: 0 0 .6rem; font-size: .9rem; }
dt { color: var(--muted); } dd { margin: 0; overflow-wrap: anywhere; }
.open { color: var(--warn); }
.question { display: grid; grid-template-columns: 12rem 1fr; gap: 0 1.2rem; border-top: 1px solid var(--line);
padding: .5rem 0; }
.question h3 { margin: 0; }
.question p { margin: 0 0 .2rem; font-size: .92rem; }
.in-print { display: none; }
.sign { display: flex; gap: 2rem; margin-top: 1.6rem; } .sign span { flex: 1; border-top: 1px solid var(--ink); }
summary { cursor: pointer; padding: .3rem 0; }
footer { padding-top: 1rem; padding-bottom: 2rem; }
@media (max-width: 52rem) { .two.by-class { grid-template-columns: minmax(0, 1fr); } }
@media (max-width: 40rem) { .question { grid-template-columns: 1fr; } }
@page { size: A4; margin: 13mm 14mm 14mm; @bottom-right { content: "page " counter(page) " of " counter(pages);
font: 8pt sans-serif; } }
@media print {
  :root { color-scheme: light; --paper: #ffffff; --soft: #f3f5f8; --ink: #111111; --muted: #444444; --line: #b5b5b5;
    --series-1: #1f5fae; --series-2: #a8480f; --series-3: #1c7a48; --series-4: #7a3fa0;
    --good: #13653a; --warn: #7a3400; }
  body { font-size: 9pt; line-height: 1.34; }
  header, nav, main, footer { max-width: none; padding: 0; }
  nav, details, .skip, footer { display: none; }
  h1 { font-size: 15pt; }
  h2 { font-size: 12.5pt; margin-bottom: 1.5mm; }
  h3 { font-size: 9.5pt; margin: 2.6mm 0 1mm; }
  h4 { font-size: 9pt; margin: 2mm 0 .6mm; }
  p { margin-bottom: 1.5mm; }
  section.page { padding: 0; border: 0; break-before: page; }
  section.page:first-of-type { break-before: auto; padding-top: 3mm; }
  .claim { padding: 2.5mm 4mm; margin-bottom: 3mm; }
  .claim p { font-size: 10.3pt; }
  table, caption, figcaption, .small, dl { font-size: 8pt; }
  th, td { padding: .5mm 2mm .5mm 0; }
  dl { gap: .3mm 3mm; }
  .figures { grid-template-columns: 1fr 1fr 1fr; gap: 2mm 5mm; }
  .two { grid-template-columns: 1fr 1fr; gap: 3mm 7mm; }
  figure, tr, .claim { break-inside: avoid; }
  .question { grid-template-columns: 37mm 1fr; padding: 1.1mm 0; }
  .question p { font-size: 8pt; margin-bottom: .5mm; }
  .wide { overflow: visible; }
  table.classes { font-size: 7pt; line-height: 1.15; }
  .two.by-class { grid-template-columns: 3fr 2fr; }
  .classes th[scope=row] { width: 36mm; max-width: 36mm; }
  .few tr:nth-child(n+4), .on-screen { display: none; }
  .in-print { display: block; }
  .sign { margin-top: 7mm; }
}
"""

MACROS = """
{%- macro figure(picture) -%}
<figure><figcaption>{{ picture.title }}</figcaption>{{ picture.svg | safe }}</figure>
{%- endmacro -%}
{%- macro parted(name) -%}
{%- for part in name | parts %}{{ part }}{% if not loop.last %}<wbr>{% endif %}{% endfor -%}
{%- endmacro -%}
{%- macro numbers(pairs) -%}
<dl>{% for name, value in pairs %}<dt>{{ name }}</dt><dd class="code">{{ value }}</dd>{% endfor %}</dl>
{%- endmacro -%}
"""

CLAIM = """
<section class="page" id="claim" aria-labelledby="claim-title">
<h2 id="claim-title">What is guaranteed</h2>
{% if simulated %}<p class="claim">{{ simulated[0] | upper }}{{ simulated[1:] }}.</p>{% endif %}
{% for told in meanings %}
<div class="claim{{ ' sound' if told.guaranteed and told.practical and not told.conditional }}">
<h3>{{ 'No guarantee from' if not told.guaranteed else 'Nothing to protect for' if not told.how_much
else 'Weak: the guarantee by' if not told.practical
else 'Guaranteed on a condition by' if told.conditional else 'Guaranteed by' }} {{ told.about }}</h3>
{% for sentence in told.sentences %}<p>{{ sentence | code }}</p>
{% endfor %}</div>
{% endfor %}
{% if not meanings %}
<div class="claim"><h3>No guarantee</h3><p>The run has not ended, or not in order: nothing is claimed about it.</p>
<p>What it released stands in the ledger, a line before each release.</p></div>
{% endif %}
{% if figures %}
<h3>The figures</h3>
<div class="wide" tabindex="0"><table>
<caption>ε by the tightest accountant, and what it is about. A smaller ε protects more: strong up to 1, reasonable up to
10, weak above (Ponomareva et al., 2023).</caption>
<thead><tr><th scope="col">Of</th><th scope="col">Unit</th><th scope="col" class="n">ε</th>
<th scope="col" class="n">δ</th>
<th scope="col" class="n">Best guess</th><th scope="col">Against</th><th scope="col">Scope and conditions</th></tr>
</thead>
<tbody>{% for row in figures %}
<tr><th scope="row">{{ row.mechanism }}</th><td>{{ row.unit }}</td><td class="n">{{ row.epsilon }}</td>
<td class="n">{{ row.delta }}</td><td class="n">{{ row.guess }}</td><td>{{ row.adversary }}</td>
<td>{{ row.scope }}</td></tr>
{% endfor %}</tbody></table></div>
<p class="small muted">Best guess: the largest probability with which a guess between two neighbouring datasets, both
as likely before, is right, (e<sup>ε</sup> + δ)/(1 + e<sup>ε</sup>), on average over what is released.
{% if of_whole_clients %}What DP-SGD is worth for a client as a whole stands in privacy.json.{% endif %}</p>
{% endif %}
<h3>What left without noise</h3>
{% if unprotected %}<ul class="small">{% for item in unprotected %}<li>{{ item }}</li>{% endfor %}
</ul>
{% else %}<p class="small">Nothing is known about it.</p>{% endif %}
{% if more %}<p class="small muted">{{ more }}</p>{% endif %}
</section>
"""

COURSE = """
<section class="page" id="course" aria-labelledby="course-title">
<h2 id="course-title">How the run went</h2>
<p>{{ ending }}</p>
{% if curves %}<div class="figures">{% for picture in curves %}{{ figure(picture) }}
{% endfor %}</div>{% else %}<p>No number was written down by round.</p>{% endif %}
{% for note in notes %}<p class="small muted">{{ note | code }}</p>{% endfor %}
<h3>Replies that did not count</h3>
{% if secret %}<p class="small">Cohorts were drawn in secret, and the guarantee rests on that: how many replied, and
which of them did not count, was not written down.</p>
{% elif rejected %}<div class="wide" tabindex="0"><table>
<caption>By reason{{ left_out }}</caption>
<thead><tr><th scope="col">Code</th><th scope="col">Reason</th><th scope="col" class="n">Replies</th>
<th scope="col" class="n">Nodes</th><th scope="col">Rounds</th></tr></thead>
<tbody>{% for row in rejected %}<tr><th scope="row">{{ row.code }}</th><td>{{ row.detail }}</td>
<td class="n">{{ row.replies }}</td><td class="n">{{ row.nodes }}</td><td>{{ row.rounds }}</td></tr>
{% endfor %}</tbody></table></div>
{% else %}<p class="small">Every reply counted.</p>{% endif %}
<details><summary>The same in numbers, by round</summary>
<div class="wide" tabindex="0"><table><caption>Scores and measurements by round</caption>
<thead><tr><th scope="col" class="n">Round</th>{% for name in columns %}<th scope="col" class="n">{{ name }}</th>
{%- endfor %}</tr></thead>
<tbody>{% for number, cells in by_round %}<tr><th scope="row" class="n">{{ number }}</th>
{%- for cell in cells %}<td class="n">{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</tbody></table></div></details>
<h3>Where it can be checked</h3>
{{ numbers(hashes) }}
<p class="small muted">SHA-256. <code>cloister ledger verify</code> checks a ledger against its last hash.</p>
<p class="small">Versions: {{ versions }}.</p>
{% if parameters %}<p class="small">The model has {{ parameters }}.</p>{% endif %}
<h3>Settings that differ from their defaults</h3>
<div class="columns">{% for name, value in changed %}<p class="small"><span class="muted">{{ name }}</span>
<span class="code">{{ value }}</span></p>{% endfor %}</div>
<details><summary>The whole configuration, and all hashes</summary>{{ numbers(settings) }}</details>
</section>
"""

RESULTS = """
<section class="page" id="results" aria-labelledby="results-title">
<h2 id="results-title">What the model does</h2>
{% if evaluation %}
<p>The kept model on {{ evaluation.examples }} test examples that the server has itself:
{% for name, value in evaluation.metrics.items() %}{{ name }} <strong>{{ '%.4g' | format(value) }}</strong>
{{- ', ' if not loop.last }}{% endfor %}
{%- if classification %}, macro F1 <strong>{{ '%.4g' | format(classification.macro_f1) }}</strong>
{%- if classification.auc is not none %}, AUC of a class against the others
<strong>{{ '%.4g' | format(classification.auc) }}</strong>{% endif %}{% endif %}.
As the task has it, none of them is trained on.
{% if classification %}Always guessing the largest class would be right for {{ largest }} of them.{% endif %}</p>
{% else %}<p>Nothing was measured on test data of the server.</p>{% endif %}
{% if classification %}
<div class="two by-class"><div class="wide" tabindex="0"><table class="classes">
<caption>By class{{ classes_left_out }}; beside it, what a class is most often taken for</caption>
<thead><tr><th scope="col">Class</th><th scope="col" class="n">Precision</th><th scope="col" class="n">Recall</th>
<th scope="col" class="n">F1</th><th scope="col" class="n">Examples</th><th scope="col">Taken for</th>
</tr></thead>
<tbody>{% for row, taken in classes %}<tr><th scope="row">{{ parted(row.name) }}</th>
<td class="n">{{ '%.3f' | format(row.precision) }}</td>
<td class="n">{{ '%.3f' | format(row.recall) }}</td><td class="n">{{ '%.3f' | format(row.f1) }}</td>
<td class="n">{{ row.support }}</td><td>{{ parted(taken) }}</td></tr>
{% endfor %}</tbody></table></div>
<div>{{ figure(confusion) }}
{% if roc %}<div{% if audit and audit.findings|length > 4 %} class="on-screen"{% endif %}>{{ figure(roc) }}</div>
{% endif %}</div></div>
<p class="small muted">The darker a cell of the matrix, the larger is its share of its row: of the examples that are
of this class.</p>
{% elif roc %}<div class="two">{{ figure(roc) }}</div>
{% endif %}
<h3>What attacks on this run came to</h3>
{% if audit %}
{% if audit.contradicted %}<p class="open"><strong>An attack measured more than is claimed. Where its confidence is
95 %, so it does for one right claim in twenty.</strong></p>{% endif %}
{% for line in audit.lines %}<p class="small">{{ line }}</p>{% endfor %}
<div class="two">{% for finding in audit.findings %}
<div><h4>{{ finding.name }}</h4><p class="small">{{ finding.meaning }}</p>
{% if finding.figures %}<div class="wide" tabindex="0">
<table class="figures-of{{ ' few' if audit.findings|length > 1 }}">
<caption>Figures of {{ finding.name }}</caption>
<thead><tr><th scope="col">Attack</th><th scope="col">Figure</th><th scope="col" class="n">Value</th>
<th scope="col">Notes</th></tr></thead>
<tbody>{% for row in finding.figures[:8] %}<tr><th scope="row">{{ row.attack }}</th><td>{{ row.quantity }}</td>
<td class="n">{{ row.value }}</td><td>{% if not row.holds %}<strong class="open">shows nothing: a control of this
attack did not do as expected</strong> {% endif %}{{ row.notes }}</td></tr>
{% endfor %}</tbody></table></div>
{% set printed = 3 if audit.findings|length > 1 else 8 %}
{% for most, where in ((8, 'on-screen'), (printed, 'in-print')) if finding.figures|length > most %}
<p class="small {{ where }}">{{ finding.figures|length - most }} more are in audit.json.</p>
{% endfor %}
{% endif %}</div>
{% endfor %}</div>
{% for line in audit.skipped %}<p class="small">Not made: {{ line }}.</p>{% endfor %}
{% else %}<p class="small">No attack was tried on this run. An attack can contradict a claim; it can never prove
one.</p>{% endif %}
</section>
"""

OFFICER = """
<section class="page" id="officer" aria-labelledby="officer-title">
<h2 id="officer-title">For the officer</h2>
<p class="small">The questions of NIST SP 800-226, Guidelines for Evaluating Differential Privacy Guarantees. What
the run itself knows is answered; the rest is for the operator of the federation to state.</p>
{% for question in questions %}
<div class="question"><h3>{{ question.title }}</h3><div>
{% for fact in question.facts %}<p>{{ fact | code }}</p>{% endfor %}
{% if question.stated %}<p><strong>The operator states:</strong> {{ question.stated }}</p>
{% else %}<p class="open"><strong>To be stated by the operator:</strong> {{ question.open }}.</p>{% endif %}
</div></div>
{% endfor %}
<p class="sign small"><span>Name</span><span>Place, date</span><span>Signature</span></p>
</section>
"""

FRAME = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="robots" content="noindex">
<title>{% block title %}{% endblock %}</title>
<style>{{ style | safe }}</style>
</head>
<body>
<a class="skip" href="#main">{% block skip %}{% endblock %}</a>
<header>
{% block header %}{% endblock %}
</header>
<nav aria-label="Parts of this {% block kind %}page{% endblock %}"><ul>
{% block links %}{% endblock %}
</ul></nav>
<main id="main">
{% block content %}{% endblock %}
</main>
<footer><p class="small muted">{% block made %}{% endblock %} This page loads
nothing and runs no script.</p></footer>
</body>
</html>
"""
"""Common frame of pages; `PAGE`, or the page of a comparison, fills its blocks."""

PAGE = (
    """
{% block title %}Privacy report of {{ name }}{% endblock %}
{% block skip %}Skip to the claim{% endblock %}
{% block header %}
<p class="small muted">Cloister · privacy report of a {{ "simulated " if simulated }}federated training run</p>
<h1>{{ name }}</h1>
<p class="muted">{{ about }}</p>
{% endblock %}
{% block kind %}report{% endblock %}
{% block links %}
<li><a href="#claim">What is guaranteed</a></li><li><a href="#course">How the run went</a></li>
<li><a href="#results">What the model does</a></li><li><a href="#officer">For the officer</a></li>
{% endblock %}
{% block content %}
"""
    + CLAIM
    + COURSE
    + RESULTS
    + OFFICER
    + """
{% endblock %}
{% block made %}Made from the files of the run directory alone; the same files give the same page.{% endblock %}
"""
)


def filled(page: str, context: Mapping[str, object], frame: str = FRAME) -> str:
    """Render a page, with all context values escaped.

    Args:
        page: the blocks of the page.
        context: values of the template's expressions.
        frame: common frame of the pages.
    """
    from jinja2 import DictLoader, Environment, StrictUndefined

    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: clean(value) if type(value) is str else value,  # markup stays unchanged
        loader=DictLoader({"frame": frame, "page": PARTS + page, "macros": MACROS}),
    )
    environment.filters |= {"parts": parts, "code": code}
    return environment.get_template("page").render({"style": STYLE, **context})


def code(text: str) -> "Markup":
    """Return a sentence as HTML, with text between backticks as code.

    Args:
        text: not escaped.

    Examples:
        >>> code("see `cloister plan` <here>")
        Markup('see <code>cloister plan</code> &lt;here&gt;')
    """
    from markupsafe import Markup, escape

    pieces = map(escape, clean(text).split("`"))
    return Markup("").join(Markup("<code>{}</code>").format(one) if at % 2 else one for at, one in enumerate(pieces))


PARTS = """{% extends "frame" %}{% from "macros" import figure, numbers, parted %}"""
