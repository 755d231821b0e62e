"""The cost of a secure sum to each client and the server: bytes on the wire, and seconds of computation.

    python -m simulations.benchmarks.secure_aggregation [--clients 3 5 10 30 100] [--dimension 28000] [--repeats 3]

The protocol alone, without Flower and training: all nodes and the server in one process, every signature checked as
often as in a deployment, a modulus of 32 bits, CPU seconds of one core; a client's are the mean over nodes. At most a
tenth of the clients collude, and the threshold is the smallest allowed. Once every client stays, and once all but the
threshold drop out after they have shared, which costs the server most. The median of the repeats.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from fedpriv.holder.sums import Identity, Participant, Session, Terms, make_identity, server, smallest_threshold
from simulations.benchmarks._measuring import claim

BYTES, ALL = "bytes of a client / float32 upload", "CPU seconds of all parties"
SERVER = "CPU seconds of the server after dropouts"
# {K: {claim: target}}
TARGETS = {5: {BYTES: 3.0, ALL: 0.5}, 100: {SERVER: 1.0, ALL: 8.0}}


@dataclass(kw_only=True)
class AttemptCosts:
    """The costs of one attempt.

    Attributes:
        seconds: {"nodes" or "server": CPU seconds}.
        sent: bytes that client 0 sends.
        received: bytes that it gets.
    """

    seconds: dict[str, float] = field(default_factory=lambda: {"nodes": 0.0, "server": 0.0})
    sent: int = 0
    received: int = 0

    @contextmanager
    def of(self, who: str) -> Iterator[None]:
        """Within this context these compute."""
        started = time.process_time()
        yield
        self.seconds[who] += time.process_time() - started


def make_terms(identities: Sequence[Identity], dimension: int) -> Terms:
    """Terms of these nodes."""
    count = len(identities)
    participants = tuple(
        Participant(client=k, identity=node.public_line, num_records=1000, sampling_probability=0.0625, scale=1.0)
        for k, node in enumerate(identities)
    )
    return Terms(
        run="benchmark",
        round=1,
        attempt="00" * 16,
        participants=participants,
        threshold=smallest_threshold(count, count // 10),
        colluding=count // 10,
        modulus_bits=32,
        grid_exponent=14,
        dimension=dimension,
        clip_norm=1.0,
        noise_multiplier=1.0,
        request="00" * 32,
    )


def attempt(identities: Sequence[Identity], dimension: int, *, dropouts: bool) -> AttemptCosts:
    """The costs of one attempt, in which all stay, or all but the threshold drop out before their masked vectors."""
    terms, costs = make_terms(identities, dimension), AttemptCosts()
    generator = np.random.default_rng(0)
    values = {k: generator.integers(-(2**20), 2**20, dimension) for k in terms.by_client}
    staying = range(terms.threshold if dropouts else len(identities))
    with costs.of("nodes"):
        sessions = {k: Session(terms, k, sign=node.sign, approved=None) for k, node in enumerate(identities)}
    with costs.of("server"):
        u1 = server.collect_advertisements(terms, {k: node.advertisement for k, node in sessions.items()})
        advertisements = u1.message()
    with costs.of("nodes"):
        dealt = {k: session.share(advertisements) for k, session in sessions.items()}
    with costs.of("server"):
        u2 = server.collect_shares(u1, dealt)
        sealed = {k: u2.message(k) for k in sessions}
    with costs.of("nodes"):
        checked = {k: session.check(sealed[k]) for k, session in sessions.items()}
    with costs.of("server"):
        u2 = server.collect_checks(u2, checked)
    with costs.of("nodes"):
        masked = {k: sessions[k].mask(sealed[k], values[k]) for k in staying}
    with costs.of("server"):
        u3 = server.collect_masked(u2, masked)
        survivors = u3.message()
    with costs.of("nodes"):
        signed = {k: sessions[k].confirm(survivors) for k in staying}
    with costs.of("server"):
        u4 = server.collect_signatures(u3, signed)
        signatures = u4.message()
    with costs.of("nodes"):
        revealed = {k: sessions[k].reveal(signatures) for k in staying}
    with costs.of("server"):
        total = server.recover(u4, revealed)
    if not np.array_equal(total.values, sum(values[k] for k in staying)):
        raise RuntimeError("the masked sum is not the sum")
    costs.received = sum(map(len, (terms.text(), advertisements, sealed[0], sealed[0], survivors, signatures)))
    texts = (sessions[0].advertisement, dealt[0], checked[0], signed[0], revealed[0])
    costs.sent = sum(map(len, texts)) + masked[0].nbytes
    return costs


def row(clients: int, dimension: int, repeats: int) -> tuple[str, dict[str, float]]:
    """A row of the table, and the figures of the claims."""
    identities = [make_identity() for _ in range(clients)]
    full, few = (
        [attempt(identities, dimension, dropouts=dropouts) for _ in range(repeats)] for dropouts in (False, True)
    )
    moved, plain = full[0].sent + full[0].received, 4 * dimension
    each = median(costs.seconds["nodes"] for costs in full) / clients
    by_server = [median(costs.seconds["server"] for costs in series) for series in (full, few)]
    everyone = median(sum(costs.seconds.values()) for costs in full)
    threshold = smallest_threshold(clients, clients // 10)
    cells = (clients, threshold, full[0].sent, full[0].received, f"{moved / plain:.2f}")
    times = (f"{seconds:.3f}" for seconds in (each, *by_server, everyone))
    return f"| {' | '.join(map(str, (*cells, *times)))} |", {BYTES: moved / plain, SERVER: by_server[1], ALL: everyone}


def main() -> None:
    """Print a table and JSON lines last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[3, 5, 10, 30, 100])
    parser.add_argument("--dimension", type=int, default=28_000)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    print(f"d = {arguments.dimension}: a float32 upload is {4 * arguments.dimension} bytes\n")
    print("| K | t | sent | received | / float32 | client, s | server, s | server with dropouts, s | all parties, s |")
    print(f"|{' --- |' * 9}")
    rows = {clients: row(clients, arguments.dimension, arguments.repeats) for clients in arguments.clients}
    for line, _ in rows.values():
        print(line)
    for clients in sorted(rows.keys() & TARGETS):
        for cost, target in TARGETS[clients].items():
            claim(f"secure aggregation among {clients}: {cost}", at_most=target, ratio=rows[clients][1][cost])


if __name__ == "__main__":
    main()
