"""The SuperLink that serves a federation: Flower's own, with limits, and with nodes that learn nothing of each other.

The open-source SuperLink of flwr 1.41 authenticates nobody who starts a run, registers a node or reads a log, and
serves nodes and operators on one port. Which plugin authenticates operators no option can say, so that the parts of
Flower's SuperLink are put together here.

    request → door (whose it is, how large) → shortcut or Flower's routes → what stands in front of Flower's functions
    → Flower's functions → state database

serve, app, operators      the process; what is in front of what; who may start runs
door, senders, shortcut    a request before Flower sees it
in_front                   the noun: methods in the place of Flower's functions, which they call
gate                       a node's own messages and replies, and no totals
cleanup, runs, revoked, node_keys
                           what nobody fetches, ended runs, keys of nodes
database                   the state: patient, bounded
"""
