"""Secure aggregation: the server learns the sum of the clients' integer vectors, and no single vector.

The protocol of Bonawitz et al. (2017, the variant against active adversaries) as state machines: no transport, no
noise, no configuration. `docs/secure_aggregation.md` lists the view of each party, and the limits of the guarantee.
`member.Member` is one client in one round, `coordinator.Coordinator` the server.

- **Primitives.** X25519, Ed25519, HKDF-SHA256, AES-128-GCM for shares, AES-128 in counter mode for masks, Shamir's
  shares over GF(2^128). Seeds have 16 bytes, from the operating system.
- **Binding.** In an attempt (`member`) every derived key and sealed share depends on run, round, threshold, collusion,
  vector size, ring, roster and all keys. `epoch` has its own protocol, described there.
- **Signatures.** A member signs noise terms and sharers with its vector. Before step `sign` members check that every
  survivor signed the same. A member unmasks after t survivors have signed the identical text: run, round, hashes of
  roster and cohort with its keys, h, t, c, the noise terms, and the survivors. With 2t > n + c there is one such list:
  two lists would have more than c signers in common, and an honest member signs once.
- **Steps** run once, in order. A refused step ends the attempt, and the member drops its secrets; Python may leave
  copies in free memory.
- **Repetition.** A second attempt with the same vector and other survivors would show their difference. The caller must
  not retry a round with the same vector, and must charge a round from the moment a masked vector has left.
- **Shares that cannot be opened** are dropped. Members open shares before they train, so that no other member can block
  a vector afterwards.
- **Surplus noise.** After the survivors are signed, a member reveals the seeds of its surplus
  (`cloister.privacy.mechanisms.distributed.shares`).
"""
