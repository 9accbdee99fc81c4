"""Exceptions of Cloister that a user can meet, in one tree.

    CloisterError
    ├── ConfigError             a key of the run configuration is unknown, mistyped or contradicts another
    │   ├── SettingsError           settings on a command line cannot be parsed
    │   └── NodeConfigError         a node's own configuration is not valid
    ├── PluginError             a plugin name is unknown, claimed twice or does not load
    ├── DataError               a data file is absent or not in its task's format
    ├── FederationError         no reply counts, or arrays do not belong to this run's model
    │   ├── TooFewNodes             fewer nodes are connected than a round needs
    │   └── RoundAbandoned          fewer members than its threshold are left in a secure aggregation
    └── PrivacyError            a privacy guarantee would be broken
        ├── UnboundedSensitivity    noise was requested for contributions without a bound
        ├── UnsupportedModel        a model has no per-example gradients, or none that can be verified
        ├── PolicyError             a site's policy refuses a request of a run
        ├── ProtocolError           a party of a secure aggregation breaks the protocol, or sends no message of it
        ├── LedgerError             a ledger is broken, or could not be written
        └── BudgetExhausted         the next release would exceed a budget; it has not been computed

Messages name keys, shapes and counts. They never carry values of examples, weights or updates: an error may
cross the network.
"""


class CloisterError(Exception):
    """Base class of all errors raised on purpose. The text is safe to send to the other side."""


class ConfigError(CloisterError):
    """A key of the run configuration is unknown, mistyped or contradicts another."""


class SettingsError(ConfigError):
    """Settings on a command line cannot be read: they are neither `key=value` pairs nor a TOML file."""


class NodeConfigError(ConfigError):
    """Invalid configuration of a node. Its details are only for the node's own log."""


class PluginError(CloisterError):
    """A plugin name is unknown, claimed twice or does not load."""


class DataError(CloisterError):
    """A data file is absent or is not in its task's format.

    Args:
        text: reason, safe for every reader.
        first: place and content of the first fault, for the owner of the file; `cloister check task` shows it. It is
            separate from the text, and so absent from logs and replies to a server.
    """

    def __init__(self, text: str, first: str = "") -> None:
        super().__init__(text)
        self.first = first

    def of(self, key: str) -> "DataError":
        """Return this error as one of another key than `data-path`; empty: of no key."""
        text = str(self).removeprefix("data-path: ")
        return DataError(f"{key}: {text}" if key else text, self.first)


class FederationError(CloisterError):
    """No reply counts, or arrays do not belong to this run's model."""


class TooFewNodes(FederationError):
    """Fewer nodes are connected than a round needs: a public fact, which may end a run."""


class RoundAbandoned(FederationError):
    """Fewer members than its threshold are left in a secure aggregation: its sum stays unknown."""


class PrivacyError(CloisterError):
    """A privacy guarantee would be broken."""


class UnboundedSensitivity(PrivacyError):
    """Noise was requested for contributions without a bound."""


class UnsupportedModel(PrivacyError):
    """A model has no per-example gradients, or none that can be verified."""


class PolicyError(PrivacyError):
    """A site's policy refuses a request of a run."""


class ProtocolError(PrivacyError):
    """A party of a secure aggregation breaks the protocol, or sends no message of it."""


class LedgerError(PrivacyError):
    """A ledger is broken, or could not be written. Nothing is released without a ledger entry."""


class BudgetExhausted(PrivacyError):
    """The next release would exceed a budget. It has not been computed."""
