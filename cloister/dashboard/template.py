"""Templates of the page in Python strings: an app bundle of Flower contains no `.html` and no `.js` files."""

SCRIPT = """"use strict";
// Fetch this page again and put its main part in the place of the old one. Without this script, reload the page.
async function refresh() {
  const main = document.getElementById("main");
  // Keep a focused link or table, and skip hidden pages.
  if (!document.hidden && !main.contains(document.activeElement)) {
    let found = null;
    try {
      const answer = await fetch(location.href, {cache: "no-store", redirect: "error"});
      const text = answer.ok ? await answer.text() : "";
      found = new DOMParser().parseFromString(text, "text/html").getElementById("main");
    } catch { /* no answer */ }
    document.getElementById("lost").hidden = found !== null;
    if (found) main.replaceWith(found);
    // The page may forbid its own renewal.
    if (found && found.dataset.live !== "yes") return;
  }
  setTimeout(refresh, 5000);
}
setTimeout(refresh, 5000);
"""
"""Content of `/live.js`; the page contains no inline script."""

STYLE = """
.critical, .warning, .lost { color: var(--warn); }
.critical { font-weight: 600; }
td.n + td, th.n + th { padding-left: .8rem; }
"""

FRAME = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="robots" content="noindex">
<title>{% block title %}{% endblock %}</title>
<style>{{ style | safe }}{{ own_style | safe }}</style>
{% if live %}<script src="/live.js" defer></script>
{% endif %}
</head>
<body>
<a class="skip" href="#main">Skip to the content</a>
<header>
<p class="small muted">Cloister · dashboard of a federation</p>
<h1>{% block heading %}{% endblock %}</h1>
</header>
<nav aria-label="Parts of this dashboard"><ul>
{% block links %}{% endblock %}
</ul></nav>
<p class="lost" id="lost" role="status" hidden>The dashboard does not answer: what stands here is old.</p>
<main id="main" data-live="{{ 'yes' if live else 'no' }}">
<section class="page" aria-label="State of this page">
<p class="small muted">Looked at {{ when }}.
{% if live %}<noscript>Reload the page for the latest state.</noscript>
It is renewed every few seconds; <a href="?live=off">stop that</a>.
{% elif secret %}It is not renewed by itself, so that nothing notes when a round ends: times would
tell of a secret draw. Reload it for the latest state.
{% else %}It is not renewed by itself; <a href="?live=on">renew it every few seconds</a>.{% endif %}</p>
</section>
{% block content %}{% endblock %}
</main>
<footer><p class="small muted">This page can be read and changes nothing. It shows what <code>cloister status</code>
and <code>cloister watch</code> see.</p></footer>
</body>
</html>
"""
"""Frame of the page."""

OVERVIEW = """
{% block title %}Federation{{ ' ' + connection if connection }}: dashboard{% endblock %}
{% block heading %}Federation{{ ' ' + connection if connection }}{% endblock %}
{% block links %}
<li><a href="#events">Events</a></li><li><a href="#nodes">Nodes</a></li>
<li><a href="#runs">Runs</a></li><li><a href="#budgets">Budgets</a></li>
{% endblock %}
{% block content %}
<section class="page" id="events" aria-labelledby="events-title">
<h2 id="events-title">Events</h2>
{% if found %}<ul>{% for item in found %}
<li><span class="{{ item.level }}">{{ item.level }}</span>: {{ item.kind }}: {{ item.text }}</li>
{% endfor %}</ul>
{% else %}<p>Nothing is wrong.</p>{% endif %}
{% if rejected %}<h3>Replies of the newest run's last round that did not count</h3>
<ul class="small">{% for reason in rejected %}<li>{{ reason }}</li>{% endfor %}</ul>{% endif %}
</section>
<section class="page" id="nodes" aria-labelledby="nodes-title">
<h2 id="nodes-title">Nodes</h2>
{% if nodes is none %}<p>{{ 'SuperLink ' ~ connection ~ ' gave no answer' if connection
else 'No SuperLink was asked: cloister dashboard CONNECTION names one' }}.</p>
{% elif nodes %}<div class="wide" tabindex="0" role="group" aria-label="Table of nodes"><table>
<caption>All that are registered, {{ online }} of {{ nodes | length }} online</caption>
<thead><tr><th scope="col">Site</th><th scope="col">State</th><th scope="col">Since</th></tr></thead>
<tbody>{% for node in nodes %}<tr><th scope="row">{{ node.name or 'node ' + node['node-id'] }}</th>
<td>{{ node.status }}</td><td>{{ node.since or 'never seen' }}</td></tr>
{% endfor %}</tbody></table></div>
{% else %}<p>No node is registered.</p>{% endif %}
</section>
<section class="page" id="runs" aria-labelledby="runs-title">
<h2 id="runs-title">Runs</h2>
{% if runs %}<div class="wide" tabindex="0" role="group" aria-label="Table of runs"><table>
<caption>By the directories in output-dir, the newest first{{ ', and ' ~ older ~ ' older ones' if older }}</caption>
<thead><tr><th scope="col">Run</th><th scope="col">Task</th><th scope="col">Privacy</th>
<th scope="col" class="n">Round</th><th scope="col">State</th><th scope="col">Time left</th>
<th scope="col" class="n">ε</th></tr></thead>
<tbody>{% for run in runs %}<tr><th scope="row">{{ run.name }}</th>
{% if run.facts is none %}<td colspan="6">its files are not what a run writes</td>{% else %}
<td>{{ run.facts.task }}</td><td>{{ run.facts.privacy }}</td><td class="n">{{ run.facts.round }}</td>
<td>{{ run.facts.state }}</td><td>{{ run.facts.left }}</td><td class="n">{{ run.facts.epsilon }}
{%- if run.facts.little %}<br><span class="warning">{{ run.facts.little }}</span>{% endif %}</td>
{% endif %}</tr>
{% endfor %}</tbody></table></div>
{% for name, facts in details.items() %}<details><summary>{{ name }}</summary>
<dl>{% for title, value in facts %}<dt>{{ title }}</dt><dd>{{ value }}</dd>{% endfor %}</dl></details>
{% endfor %}
{% else %}<p>There is no run yet, or none is looked at.</p>{% endif %}
</section>
<section class="page" id="budgets" aria-labelledby="budgets-title">
<h2 id="budgets-title">Budgets</h2>
{% if secret %}<p>While a run goes on whose times are secret, ledgers are not shown.</p>
{% elif spent %}<div class="wide" tabindex="0" role="group" aria-label="Table of budgets"><table>
<caption>What is spent of the budgets in force</caption>
<thead><tr><th scope="col">Ledger</th><th scope="col">For each</th><th scope="col" class="n">Spent</th></tr></thead>
<tbody>{% for row in spent %}<tr><th scope="row" class="code">{{ row.ledger }}</th><td>{{ row.unit }}</td>
<td class="n">{{ row.share }}</td></tr>
{% endfor %}</tbody></table></div>
{% elif not closed %}<p>No ledger with a budget is looked at.</p>{% endif %}
{% if closed and not secret %}<p class="warning">No budget can be kept any more on the data of these ledgers: some of
their releases have no guarantee.</p>
<ul>{% for row in closed %}<li><span class="code">{{ row.ledger }}</span>, for each {{ row.unit }}</li>{% endfor %}</ul>
{% endif %}
</section>
{% endblock %}
"""
