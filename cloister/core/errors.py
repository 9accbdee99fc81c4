"""Every error a user of Cloister can meet, in one tree.

    CloisterError
    ├── ConfigError             a key of the run configuration is unknown, mistyped or contradicts another
    │   ├── SettingsError           settings on a command line cannot be read as such
    │   └── NodeConfigError         a node's own configuration is not valid
    ├── PluginError             a plugin name is unknown, claimed twice or does not load
    ├── DataError               a data file is absent or is not what its task reads
    ├── FederationError         nobody's reply counts, or arrays that do not belong to this run's model
    │   ├── TooFewNodes             fewer nodes are connected than a round needs
    │   └── RoundAbandoned          fewer members than its threshold are left in a secure aggregation
    └── PrivacyError            a privacy guarantee would be broken
        ├── UnboundedSensitivity    noise was asked for before anything bounded a contribution
        ├── UnsupportedModel        a model's examples have no gradients of their own, or none that can be vouched for
        ├── PolicyError             a site's policy refuses what a run asks of it
        ├── ProtocolError           a party of a secure aggregation asks for what the protocol does not allow
        ├── LedgerError             a ledger is broken, or could not be written
        └── BudgetExhausted         the next release would pass a budget; nothing of it has been made

Messages name keys, shapes and counts. They never carry values of examples, weights or updates: an error may
cross the network.
"""


class CloisterError(Exception):
    """Base of all errors raised on purpose; its text is safe to show to the other side."""


class ConfigError(CloisterError):
    """A key of the run configuration is unknown, mistyped or contradicts another."""


class SettingsError(ConfigError):
    """Settings on a command line cannot be read: they are neither `key=value` pairs nor a TOML file."""


class NodeConfigError(ConfigError):
    """A node's own configuration is not valid; what is wrong with it is for the node's log alone."""


class PluginError(CloisterError):
    """A plugin name is unknown, claimed twice or does not load."""


class DataError(CloisterError):
    """A data file is absent or is not what its task reads.

    Args:
        text: what is wrong, as anybody may read it.
        first: where it is wrong first, and what stands there: for whoever has the file, as `cloister check task` shows
            it. It is no part of the text, so that no log, and no reply to a server, has it.
    """

    def __init__(self, text: str, first: str = "") -> None:
        super().__init__(text)
        self.first = first


class FederationError(CloisterError):
    """Nobody's reply counts, or arrays that do not belong to this run's model."""


class TooFewNodes(FederationError):
    """Fewer nodes are connected than a round needs: a public fact, which may end a run."""


class RoundAbandoned(FederationError):
    """Fewer members than its threshold are left in a secure aggregation: its sum stays unknown."""


class PrivacyError(CloisterError):
    """A privacy guarantee would be broken."""


class UnboundedSensitivity(PrivacyError):
    """Noise was asked for before anything bounded a contribution."""


class UnsupportedModel(PrivacyError):
    """A model's examples have no gradients of their own, or none that can be vouched for."""


class PolicyError(PrivacyError):
    """A site's policy refuses what a run asks of it."""


class ProtocolError(PrivacyError):
    """A party of a secure aggregation asks for what the protocol does not allow, or sends no message of it."""


class LedgerError(PrivacyError):
    """A ledger is broken, or could not be written; nothing is released without one."""


class BudgetExhausted(PrivacyError):
    """The next release would pass a budget; nothing of it has been made."""
