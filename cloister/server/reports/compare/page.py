"""Comparison of runs as one self-contained HTML page, in the frame of a run's report."""

from pathlib import Path

from cloister.core.errors import ConfigError
from cloister.core.files import atomic_path
from cloister.core.text import counted
from cloister.server.reports.compare.comparison import Comparison
from cloister.server.reports.compare.figures import pictures
from cloister.server.reports.compare.table import fitting
from cloister.server.reports.html.filling import filled

PAGE = """
{% block title %}{{ title }}{% endblock %}
{% block skip %}Skip to the table{% endblock %}
{% block header %}
<p class="small muted">Cloister · federated training runs beside each other</p>
<h1>{{ title }}</h1>
<p class="muted">{{ about }}</p>
{% endblock %}
{% block kind %}comparison{% endblock %}
{% block links %}
<li><a href="#table">The runs</a></li><li><a href="#figures">Figures</a></li>
{% endblock %}
{% block content %}
<section class="page" id="table" aria-labelledby="table-title">
<h2 id="table-title">The runs</h2>
<div class="wide" tabindex="0"><table class="runs">
<caption>{{ 'The' if settings else 'The settings that differ, the' }} scores, and what is claimed</caption>
<thead><tr>{% for name in table.columns %}<th scope="col"{% if table.numeric[loop.index0] %} class="n"{% endif %}>
{{- name }}</th>{% endfor %}</tr></thead>
<tbody>{% for row in table.rows %}<tr><th scope="row">{{ row[0] }}</th>
{%- for cell in row[1:] %}<td{% if table.numeric[loop.index] %} class="n"{% endif %}>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</tbody></table></div>
{% if settings %}<h3>Settings that differ</h3>
{% for group in settings %}<p class="small">{{ group }}</p>
{% endfor %}{% endif %}
{% if notes %}<h3>How to read it</h3>
{% for note in notes %}<p class="small">{{ note }}</p>
{% endfor %}{% endif %}
</section>
<section class="page" id="figures" aria-labelledby="figures-title">
<h2 id="figures-title">Figures</h2>
{% if pictures %}<div class="two">{% for picture in pictures %}{{ figure(picture) }}
{% endfor %}</div>{% else %}<p>No run has a score that could be drawn.</p>{% endif %}
</section>
{% endblock %}
{% block made %}Made from the files of the run directories alone; the same files give the same page.{% endblock %}
"""


def write_page(comparison: Comparison, path: Path, title: str = "") -> None:
    """Write a comparison as an HTML file.

    Args:
        comparison: of runs.
        path: of the file; its folder must exist.
        title: of the page; empty: a title with the number of runs.

    Raises:
        ConfigError: the file cannot be written.
    """
    page = rendered(comparison, title)
    try:
        with atomic_path(path) as partial:
            partial.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def rendered(comparison: Comparison, title: str = "") -> str:
    """Return the page as HTML.

    Args: as `write_page`.
    """
    tasks = sorted({str(run.facts.config.get("task.name")) for run in comparison.runs})
    count, (table, settings) = len(comparison.runs), fitting(comparison)
    context = {
        "title": title or f"Comparison of {counted(count, 'run')}",
        "about": f"{counted(count, 'run')} of {', '.join(tasks)}",
        "table": table,
        "settings": settings,
        "notes": comparison.notes,
        "pictures": pictures(comparison),
    }
    return filled(PAGE, context)
