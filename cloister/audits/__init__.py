"""Attackers on our own side: what measures a mechanism instead of believing it."""
