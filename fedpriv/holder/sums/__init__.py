"""Secure aggregation: a server learns the sum of what at least t clients sent, and nothing of its parts.

Bonawitz et al. 2017 with the consistency round, against a server that may deviate. Pure functions over frozen states;
`docs/secure_aggregation.md` says what it protects and what it does not.

>>> import numpy as np
>>> from fedpriv.holder.sums import Participant, Session, Terms, make_identity, server
>>> nodes = {client: make_identity() for client in range(4)}
>>> terms = Terms(
...     run="trial", round=1, attempt="00" * 16, threshold=3, colluding=0, modulus_bits=32, grid_exponent=10,
...     dimension=4, clip_norm=1.0, noise_multiplier=1.0, request="00" * 32,
...     participants=tuple(
...         Participant(client=client, identity=node.public_line, num_records=9, sampling_probability=1.0, scale=1.0)
...         for client, node in nodes.items()
...     ),
... )
>>> sessions = {k: Session(terms, k, sign=node.sign, approved=None) for k, node in nodes.items()}
>>> u1 = server.collect_advertisements(terms, {k: session.advertisement for k, session in sessions.items()})
>>> u2 = server.collect_shares(u1, {k: session.share(u1.message()) for k, session in sessions.items()})
>>> u2 = server.collect_checks(u2, {k: session.check(u2.message(k)) for k, session in sessions.items()})
>>> masked = {k: session.mask(u2.message(k), np.full(4, -5 * k)) for k, session in sessions.items()}
>>> u3 = server.collect_masked(u2, {k: masked[k] for k in (1, 2, 3)})  # client 0 has dropped out
>>> u4 = server.collect_signatures(u3, {k: sessions[k].confirm(u3.message()) for k in u3.survivors})
>>> server.recover(u4, {k: sessions[k].reveal(u4.message()) for k in u3.survivors}).values
array([-30, -30, -30, -30])
"""

from typing import TYPE_CHECKING

from fedpriv.exports import lazy_exports

if TYPE_CHECKING:
    from fedpriv.holder.sums import server as server
    from fedpriv.holder.sums._masks import Identity as Identity
    from fedpriv.holder.sums._masks import make_identity as make_identity
    from fedpriv.holder.sums._masks import read_identity as read_identity
    from fedpriv.holder.sums._masks import to_centred as to_centred
    from fedpriv.holder.sums._masks import to_words as to_words
    from fedpriv.holder.sums._masks import verify_once as verify_once
    from fedpriv.holder.sums._masks import word_dtype as word_dtype
    from fedpriv.holder.sums._messages import MAX_RECEIPT as MAX_RECEIPT
    from fedpriv.holder.sums._messages import MAX_RECEIPTS as MAX_RECEIPTS
    from fedpriv.holder.sums._session import Session as Session
    from fedpriv.holder.sums._session import Sessions as Sessions
    from fedpriv.holder.sums._terms import DealerError as DealerError
    from fedpriv.holder.sums._terms import Participant as Participant
    from fedpriv.holder.sums._terms import ProtocolError as ProtocolError
    from fedpriv.holder.sums._terms import Terms as Terms
    from fedpriv.holder.sums._terms import TooFewError as TooFewError
    from fedpriv.holder.sums._terms import smallest_threshold as smallest_threshold
    from fedpriv.holder.sums._terms import terms_from_text as terms_from_text
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
