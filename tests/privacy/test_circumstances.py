"""Actions of a run beside a client's mechanism, stated in full."""

from support import failures

from cloister.privacy.mechanisms.selection import ReleaseContext

SEEDED = "the noise is seeded: whoever knows privacy.noise-seed can remove it"
EXACT = "privacy.choice is 'exact': which hypothesis suits the examples is found out without noise"


def test_what_is_said_of_a_choice_in_four_rounds():
    def check(found, caveats, choice, epsilon):
        assert found.caveats() == caveats
        assert found.parameters() == (
            {"privacy.choice": choice, "privacy.choice-epsilon": found.choice_epsilon} if choice else {}
        )
        assert found.epsilon_of_choices(4) == epsilon and found.chooses_privately == (choice == "private")

    cases = [
        (ReleaseContext(), [], None, 0.0),
        (ReleaseContext(seeded=True, choice_epsilon=0.3), [SEEDED], None, 0.0),
        (ReleaseContext(hypotheses=1, private=False, choice_epsilon=0.3), [], None, 0.0),
        (ReleaseContext(hypotheses=2, choice_epsilon=0.25), [], "private", 1.0),
        (ReleaseContext(True, 3, choice_epsilon=0.5), [SEEDED], "private", 2.0),
        (ReleaseContext(False, 2, private=False, choice_epsilon=0.5), [EXACT], "exact", 0.0),
        (ReleaseContext(True, 3, private=False), [SEEDED, EXACT], "exact", 0.0),
    ]
    assert failures(cases, check) == []
