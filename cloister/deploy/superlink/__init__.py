"""The SuperLink that serves a federation: Flower's own, whose nodes learn nothing of each other, with known operators.

    nginx (cloister/deploy/nginx.conf) → shortcut or Flower's routes → what stands in front of Flower's functions
    → Flower's functions → state database

serve   the process: what is in front of what, the operators, who may start runs, and the bounded state database
gate    methods in the place of Flower's functions, which they call
"""
