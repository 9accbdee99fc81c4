"""The SuperLink that serves a federation: Flower's own, with limits, and with nodes that learn nothing of each other.

    request → door (whose it is, how large) → shortcut or Flower's routes → what stands in front of Flower's functions
    → Flower's functions → state database

serve, app, operators      the process; what is in front of what; who may start runs
door, senders, http_protocol, shortcut
                           a request before Flower sees it
in_front                   the noun: methods in the place of Flower's functions, which they call
apart, handover, uploads, unfinished
                           a node's messages and replies, kept from all others
abandoned, interrupted     what was not sent to its end; what went on when the SuperLink was stopped
replies, cleanup, retries, runs, revoked
                           sizes, what nobody fetches, a busy database, ended runs, keys of nodes that were sent away
database                   the state: patient, bounded
"""
