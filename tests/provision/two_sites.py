"""A federation of two sites, and the files of its kits."""

from cloister.deploy.provision.kits import provision

POLICY = 'mechanisms = ["metric"]\n'
FEDERATION = """\
name = "hospitals"

[server]
addresses = ["fl.example.org", "10.1.2.3", "2001:db8::1"]
port = 8443
days = 90

[[sites]]
name = "north"
data-path = "/data/north's file.npz"

[[sites]]
name = "south"
partition-id = 1
num-partitions = 2
"""
THIRD = '\n[[sites]]\nname = "east"\ndata-path = "/data/east.npz"\n'
SECRETS = {
    "authority/ca.key",
    "server/server.key",
    "server/superexec.secret",
    "server/operators.sha256",
    "operator/credentials.yaml",
    "roster/roster.key",
    *(f"sites/{site}/{name}" for site in ("north", "south") for name in ("node.key", "superexec.secret")),
}
KITS = ("operator", "sites/north", "sites/south")


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def made(folder, text=FEDERATION, **options):
    """Kits of a description."""
    description = folder / "federation.toml"
    description.write_text(text)
    return provision(description, folder / "kits", POLICY, **options)
