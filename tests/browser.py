"""A real browser for tests of pages, and the rules of axe-core on what a screen reader can read."""

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or ""


def chromium(place, page, *options):
    """Return the browser's output; it has a home of its own and reaches no host but this machine.

    Args:
        place: for its home.
        page: a file, or an address.
        options: of the browser.
    """
    if not CHROMIUM:
        pytest.skip("there is no chromium on this machine (apt-get install chromium)")
    fixed = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={place / 'home'}"]
    offline = ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--disable-background-networking"]
    command = [CHROMIUM, *fixed, *offline, *options, page if isinstance(page, str) else page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, cwd=place, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


AUDIT = """<script>{axe}</script><script>axe.run(document).then(found => {{
const told = found.violations.map(one => one.id + ': ' + one.nodes[0].failureSummary);
document.body.textContent = 'violations ' + told.length + ' of ' + found.passes.length + ' rules; ' + told.join(); }});
</script></body>"""


def audited(place, page, scheme):
    """Nothing is found on the page, and what is broken on purpose is."""
    text = re.sub(r"<meta http-equiv=.*?>", "", page.read_text())
    (spec,) = importlib.util.find_spec("axe_core_python").submodule_search_locations
    audit = AUDIT.format(axe=(Path(spec) / "axe.min.js").read_text())
    probe = place / "probe.html"
    for broken, expected in ((text, 0), (text.replace('lang="en"', "").replace("<main", "<div"), 2)):
        probe.write_text(broken.replace("</body>", audit))
        told = chromium(place, probe, "--virtual-time-budget=20000", "--window-size=1200,1000", *scheme, "--dump-dom")
        violations, passes = map(int, re.search(r"violations (\d+) of (\d+) rules", told).groups())
        assert violations >= expected if expected else violations == 0, told[-2000:]
        assert passes >= 20
