"""The page in a real browser: four pages of A4, light and dark, with the network off."""

import importlib.util
import re
import shutil
import subprocess
import unicodedata
from pathlib import Path

import pypdf
import pytest
from reported import CLAIMS, evaluation, line, write_run

from cloister.server.reports.compare.comparison import compared, each_alone
from cloister.server.reports.compare.page import write_page
from cloister.server.reports.compare.runs import read_runs
from cloister.server.reports.html.page import write_report
from cloister.server.reports.html.statements import LONGEST, Statements

pytestmark = pytest.mark.slow
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or ""
A4 = (595, 842)
"""Points."""


def chromium(place, page, *options):
    """Whatever the browser prints; it has a home of its own and reaches no host."""
    if not CHROMIUM:
        pytest.skip("there is no chromium on this machine (apt-get install chromium)")
    fixed = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={place / 'home'}"]
    offline = ["--host-resolver-rules=MAP * ~NOTFOUND", "--disable-background-networking"]
    command = [CHROMIUM, *fixed, *offline, *options, page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, cwd=place, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def full():
    """Of everything as much as a page may hold."""
    words = ("as long a statement as may be made " * 20)[:LONGEST]
    reasons = [{"node_id": n, "code": "non-finite", "detail": f"{n} " + "holds NaN " * 40} for n in range(20)]
    scores = {"loss": 1.0, "accuracy": 0.5, "auc": 0.7}
    rounds = [line(number, rejected=reasons, central=scores, federated=scores) for number in range(30)]
    measured = [{"attack": f"by {n}", "quantity": "auc", "value": 0.51, "low": 0.4, "high": 0.6} for n in range(12)]
    findings = [{"name": f"audit {n}", "meaning": "What it says. " * 12, "measured": measured} for n in range(6)]
    settings = {"client.optimizer": "x" * 300, "task.partition": "dirichlet", "task.alpha": 0.3, "run-name": "r" * 60}
    run = {
        "rounds": rounds,
        "audit": {"lines": ["claimed: little", "measured: less"], "findings": findings},
        "evaluation": evaluation([f"a long name of class {n}" for n in range(40)]),
        "settings": settings | {"strategy.name": "fedprox", "strategy.proximal-mu": 0.1, "seed": 3, "num-rounds": 30},
    }
    return run, Statements(**dict.fromkeys(Statements.model_fields, words))


def pages_of(place, page):
    chromium(place, page, "--no-pdf-header-footer", f"--print-to-pdf={place / 'page.pdf'}")
    return pypdf.PdfReader(place / "page.pdf").pages


@pytest.mark.parametrize("kind", CLAIMS)
def test_it_prints_on_four_pages(tmp_path, kind):
    pages = pages_of(tmp_path, write_report(write_run(tmp_path / "run", kind)))
    assert len(pages) == 4
    titles = ("What is guaranteed", "How the run went", "What the model does", "For the officer")
    for page, title in zip(pages, titles, strict=True):
        assert title in unicodedata.normalize("NFKD", page.extract_text())  # "ffi" is one letter
        assert (round(page.mediabox.width), round(page.mediabox.height)) == A4


@pytest.mark.parametrize("kind", ["sound", "dp-sgd"])
def test_a_full_one_does_too(tmp_path, kind):
    run, statements = full()
    assert len(pages_of(tmp_path, write_report(write_run(tmp_path / "run", kind, **run), statements))) == 4


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_light_or_dark_as_asked(tmp_path, scheme):
    from PIL import Image

    page, picture = write_report(write_run(tmp_path / "run")), tmp_path / "page.png"
    asked = ["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []
    chromium(tmp_path, page, "--window-size=1200,3000", f"--screenshot={picture}", *asked)
    shown = Image.open(picture).convert("L").histogram()
    assert sum(shown[:64] if scheme == "dark" else shown[192:]) > 0.8 * sum(shown)


AUDIT = """<script>{axe}</script><script>axe.run(document).then(found => {{
const told = found.violations.map(one => one.id + ': ' + one.nodes[0].failureSummary);
document.body.textContent = 'violations ' + told.length + ' of ' + found.passes.length + ' rules; ' + told.join(); }});
</script></body>"""


@pytest.mark.parametrize("scheme", [[], ["--blink-settings=preferredColorScheme=0"]], ids=["light", "dark"])
@pytest.mark.parametrize("kind", ["sound", "none"])
def test_a_screen_reader_can_read_it(tmp_path, kind, scheme):
    """By the rules of axe-core, which are run in a copy of the page that may run scripts."""
    audited(tmp_path, write_report(write_run(tmp_path / "run", kind, **full()[0])), scheme)


@pytest.mark.parametrize("scheme", [[], ["--blink-settings=preferredColorScheme=0"]], ids=["light", "dark"])
def test_a_screen_reader_can_read_a_comparison(tmp_path, scheme):
    settings = [{"privacy.noise-multiplier": 1.0 + number} for number in range(6)]
    places = [write_run(tmp_path / f"run-{number}", settings=each) for number, each in enumerate(settings)]
    write_page(compared(each_alone(read_runs(places))), tmp_path / "page.html")
    audited(tmp_path, tmp_path / "page.html", scheme)


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


def test_its_own_policy_stops_scripts(tmp_path):
    page = write_report(write_run(tmp_path / "run"))
    page.write_text(page.read_text().replace("</body>", "<script>document.title = 'changed'</script></body>"))
    assert "<title>changed" not in chromium(tmp_path, page, "--dump-dom")
