"""The page in a real browser: four pages of A4, light and dark, with the network off."""

import re
import unicodedata

import pypdf
import pytest
from browser import audited, chromium
from reported import CLAIMS, evaluation, line, roc, write_run

from cloister.server.reports.compare.comparison import compared, each_alone
from cloister.server.reports.compare.page import write_page
from cloister.server.reports.compare.runs import read_runs
from cloister.server.reports.html.data import LONGEST, Statements
from cloister.server.reports.html.page import write_report

pytestmark = pytest.mark.slow
A4 = (595, 842)
"""Points."""


def full():
    """Of everything as much as a page may hold."""
    words = ("as long a statement as may be made " * 20)[:LONGEST]
    reasons = [{"node_id": n, "code": "non-finite", "detail": f"{n} " + "holds NaN " * 40} for n in range(20)]
    scores = {"loss": 1.0, "accuracy": 0.5, "auc": 0.7}
    rounds = [line(number, rejected=reasons, central=scores, federated=scores) for number in range(30)]
    measured = [{"attack": f"by {n}", "quantity": "auc", "value": 0.51, "low": 0.4, "high": 0.6} for n in range(12)]
    findings = [{"name": f"audit {n}", "meaning": "What it says. " * 12, "measured": measured} for n in range(6)]
    names = [f"a long name of class {n}" for n in range(40)]
    settings = {"client.optimizer": "x" * 300, "task.partition": "dirichlet", "task.alpha": 0.3, "run-name": "r" * 60}
    run = {
        "rounds": rounds,
        "audit": {"lines": ["claimed: little", "measured: less"], "findings": findings},
        "evaluation": evaluation(names) | {"roc": roc(names)},
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


def test_one_with_a_single_audit_prints_its_figures(tmp_path):
    run, statements = full()
    run["audit"]["findings"] = run["audit"]["findings"][:1]
    pages = pages_of(tmp_path, write_report(write_run(tmp_path / "run", **run), statements))
    assert len(pages) == 4
    text = pages[2].extract_text()
    assert all(f"by {number}" in text for number in range(8)) and "4 more are in audit.json" in text


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_light_or_dark_as_asked(tmp_path, scheme):
    from PIL import Image

    page, picture = write_report(write_run(tmp_path / "run")), tmp_path / "page.png"
    asked = ["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []
    chromium(tmp_path, page, "--window-size=1200,3000", f"--screenshot={picture}", *asked)
    shown = Image.open(picture).convert("L").histogram()
    assert sum(shown[:64] if scheme == "dark" else shown[192:]) > 0.8 * sum(shown)


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


WIDER = """<script>document.body.textContent = 'wider by ' + [...document.querySelectorAll('.wide')].map(
part => part.scrollWidth - part.clientWidth);</script></body>"""


def test_a_comparison_is_seen_as_a_whole(tmp_path):
    """On a screen of 1,100 pixels nothing has to be scrolled to, and in print nothing is cut off."""
    kinds = ["sound", "dp-sgd", "heuristic", "none"]
    rounds = [line(number, central={"accuracy": 0.5}, seconds={"total": 1.5}) for number in range(3)]
    more = {"client.optimizer": "adam", "client.batch-size": 64, "task.partition": "dirichlet", "task.alpha": 0.3}
    places = [
        write_run(tmp_path / f"20261122-2045{n}-hand-digits-fedavg-{kind}", kind, rounds, more if n else ())
        for n, kind in enumerate(kinds)
    ]
    write_page(compared(each_alone(read_runs(places))), tmp_path / "page.html")
    printed = " ".join("".join(page.extract_text() for page in pages_of(tmp_path, tmp_path / "page.html")).split())
    assert printed.count("4.5") == 4 and "[1]" in printed and "[2]" in printed
    text = re.sub(r"<meta http-equiv=.*?>", "", (tmp_path / "page.html").read_text())
    (tmp_path / "probe.html").write_text(text.replace("</body>", WIDER))
    shown = chromium(tmp_path, tmp_path / "probe.html", "--window-size=1100,1000", "--dump-dom")
    assert re.findall(r"wider by [\d,]*", shown) == ["wider by 0"]


def test_its_own_policy_stops_scripts(tmp_path):
    page = write_report(write_run(tmp_path / "run"))
    page.write_text(page.read_text().replace("</body>", "<script>document.title = 'changed'</script></body>"))
    assert "<title>changed" not in chromium(tmp_path, page, "--dump-dom")
