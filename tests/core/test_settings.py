"""Settings on a command line: every character of them is read, or refused."""

import json

import pytest
from hypothesis import example, given
from hypothesis import settings as effort
from hypothesis import strategies as st
from support import failures

from cloister.config.io import as_pairs, read_settings
from cloister.utils.errors import SettingsError


def test_pairs_and_their_types():
    text = (
        """num-rounds=3 task.alpha=0.5 tensorboard=false task.name='digits' run-name="a b" privacy.target-delta=1e-6"""
    )
    read = read_settings([text])
    expected = {
        "num-rounds": 3,
        "task.alpha": 0.5,
        "tensorboard": False,
        "task.name": "digits",
        "run-name": "a b",
        "privacy.target-delta": 1e-6,
    }
    assert read == expected
    assert {key: type(value) for key, value in read.items()} == {key: type(value) for key, value in expected.items()}


def test_blanks_around_the_equals_sign():
    def check(text):
        assert read_settings([f"num-rounds=1 {text} seed=2"]) == {"num-rounds": 1, "a.b": "x", "seed": 2}

    assert failures(["a.b = 'x'", "a.b= 'x'", "a.b ='x'", "  a.b\t=\n'x'  ", "a.b='x'"], check) == []


@effort(max_examples=60, deadline=None, derandomize=True)
@given(
    st.dictionaries(
        st.sampled_from(["seed", "task.name", "tensorboard", "task.alpha"]),
        st.text(st.characters(exclude_categories=["Cs"])) | st.booleans() | st.integers(-9, 9) | st.floats(-9, 9),
    )
)
@example({"secure-aggregation.enabled": True, "tensorboard": False, "task.name": 'it\'s "so" \\'})
def test_settings_that_are_told_can_be_pasted_back(settings):
    assert read_settings([as_pairs(settings)]) == settings


def test_nothing_is_nothing():
    def check(empty):
        assert read_settings(empty) == {}

    assert failures([[], [""], ["  "]], check) == []


def test_what_cannot_be_read_is_refused():
    cases = [
        ("foo", "'foo' is neither; expected key=value pairs, or the path of a TOML file"),
        ("nowhere.toml", "there is no file at nowhere.toml; expected"),
        ("seed=1 stray", "'stray' does not begin with key=value"),
        ("stray seed=1", "'stray seed=1' does not begin with key=value"),
        ("seed=1 nowhere.toml", "'nowhere.toml' does not begin with key=value"),
        ("seed", "'seed' is neither"),
        ("seed=", "seed = '' is not valid"),
        ("=1", "'=1' does not begin with key=value"),
        ("task.name=digits", "task.name = digits is not valid: a value is 'text' in quotes"),
        ("seed=1,num-rounds=2", "seed = 1,num-rounds=2 is not valid"),
        ("seed=1#2", "seed = '1#2' is not valid"),
        ("seed=1 # num-rounds=2", "'# num-rounds=2' does not begin with key=value"),
        ("run-name='a", "is not valid"),
        ("run-name='a'b", "is not valid"),
        ("run-name='a'seed=1", "is not valid"),
        ("seed=[1]", "seed is of type list"),
        ("seed={a=1}", "seed is of type dict"),
        ("seed=2020-01-01", "seed is of type date"),
        ("a..b=1", "'a..b=1' does not begin with key=value"),
        ("'seed'=1", "does not begin with key=value"),
        ("seed==1", "seed = =1 is not valid"),
        ("seed=1 seed=2", "seed is there twice"),
        (f"seed={'9' * 5000}", "is not valid"),
    ]

    def check(text, says):
        with pytest.raises(SettingsError) as caught:
            read_settings([text])
        assert says in str(caught.value) and str(caught.value).startswith("-c (--run-config): ")

    assert failures(cases, check) == []


class TestFiles:
    def test_tables_become_dots(self, tmp_path):
        path = tmp_path / "run.toml"
        path.write_text('num-rounds = 2\n[task]\nname = "digits"\n[privacy]\nserver = "none"  # for a test\n')
        assert read_settings([str(path)]) == {"num-rounds": 2, "task.name": "digits", "privacy.server": "none"}

    def test_files_and_pairs_are_mixed_and_the_later_win(self, tmp_path):
        path = tmp_path / "run=1.toml"
        path.write_text("num-rounds = 2\nseed = 2\n")
        assert read_settings(["num-rounds=1", str(path), "seed=3"]) == {"num-rounds": 2, "seed": 3}
        assert read_settings([str(path), "num-rounds=1 seed=1", "seed=3"]) == {"num-rounds": 1, "seed": 3}

    def test_a_pair_may_end_like_a_file(self):
        assert read_settings(["task.data-path='a.toml'"]) == {"task.data-path": "a.toml"}

    @pytest.mark.parametrize(
        ("name", "text", "says"),
        [
            ("run.txt", "seed = 1\n", "is neither"),
            ("run.toml", "seed = \n", "cannot be read as TOML"),
            ("run.toml", b"\xff\n", "cannot be read as TOML"),
            ("run.toml", "seed = [1, 2]\n", "seed is of type list"),
            ("run.toml", "[[task]]\nname = 'a'\n", "task is of type list"),
        ],
    )
    def test_a_file_that_is_none_of_settings(self, tmp_path, name, text, says):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(SettingsError, match=says):
            read_settings([str(path)])

    def test_a_folder_is_no_file(self, tmp_path):
        with pytest.raises(SettingsError):
            read_settings([str(tmp_path)])


keys = st.from_regex(r"[a-z][a-z0-9-]{0,6}(\.[a-z][a-z0-9-]{0,6})?", fullmatch=True)
values = st.integers(-(2**40), 2**40) | st.floats(allow_nan=False, allow_infinity=False) | st.booleans()
texts = st.text(st.characters(min_codepoint=32, max_codepoint=0x2000, exclude_characters="\x7f"), max_size=12)
blanks = st.sampled_from(["", " ", "\t", "  "])


@given(st.dictionaries(keys, values | texts, max_size=5), st.lists(blanks, min_size=10, max_size=10))
@effort(max_examples=60, deadline=None, derandomize=True)
def test_whatever_is_written_is_read(settings, around):
    pairs = [
        f"{key}{around[2 * n]}={around[2 * n + 1]}{json.dumps(value, ensure_ascii=False)}"
        for n, (key, value) in enumerate(settings.items())
    ]
    assert read_settings([" ".join(pairs)]) == settings


@given(st.lists(st.sampled_from(["a=1", "b = 'x'", "c", "=", "'", '"', "#", "d=2", "1", "x.toml", ",", "e=[", "\n"])))
@example(["a=1", "=", "1"])
@example(["c", "=", "1", "d=2", "b = 'x'"])
@effort(max_examples=300, deadline=None, derandomize=True)
def test_what_is_accepted_accounts_for_every_word(words):
    """A text that is read without an error has exactly the content of the pairs that result."""
    text = " ".join(words)
    try:
        settings = read_settings([text])
    except SettingsError:
        return
    written = "".join(f"{key}={value!r}" for key, value in settings.items())
    assert written == "".join(text.split())
