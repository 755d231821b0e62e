"""What sharing blocks costs each variant: base selection, and the attempts at private validation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from fedpriv.dedup.base_selection import Assignment, Selection, fair_limits
from fedpriv.dedup.charges import Charge, read_charges
from fedpriv.dedup.composition import PublicationCost
from fedpriv.dedup.planning import cost_of, plan
from fedpriv.dedup.work import Work


@dataclass(frozen=True, eq=False)
class Costs:
    """Which variant takes blocks of which, and the costs.

    Attributes:
        work: the deduplication.
        selection: of the bases.
        attempts: {variant: what validating it once is charged}.
    """

    work: Work
    selection: Selection
    attempts: Mapping[str, tuple[Charge, ...]]

    @classmethod
    def of(cls, work: Work) -> Costs:
        """The costs of a deduplication, with bases selected."""
        attempts = work.attempts(with_saliency=True)
        return cls(work, plan(list(work.variants.values()), work.settings, attempts), attempts)

    def originals(self, name: str) -> list[str]:
        """The variants whose blocks this one may hold, directly or indirectly."""
        assignment = self.selection.assignments.get(name)
        bases = assignment.bases if assignment else ()
        return sorted({each for base in bases for each in (base, *self.originals(base))})

    def affordable(self, name: str) -> Assignment | None:
        """The target's bases; None if it has none, or if repeated attempts left no room for another one.

        The selection knows nothing of repetitions, nor of attempts that cost more than one does now. After one, no
        epsilon may pass the next higher one as it was before deduplication, which keeps their order whatever becomes of
        the others.
        """
        assignment, originals = self.selection.assignments.get(name), self.originals(name)
        charged = self._charged((name, *originals))
        expected = [charge for each in self._targets(originals) for charge in self.attempts[each]]
        if assignment is None or Counter(charged) <= Counter(expected):
            return assignment
        variants = {each: known.as_variant(self.work.settings.accountant) for each, known in self.work.variants.items()}
        limit = min(assignment.limits.epsilon, fair_limits(variants[name], list(variants.values())).epsilon)
        cost = self._cost((name, *originals), [*charged, *self.attempts[name]])
        return assignment if cost.guarantee.epsilon <= limit else None

    def after(self, name: str, *, is_target: bool) -> PublicationCost:
        """What the variant costs once it is stored.

        Args:
            name: of the variant.
            is_target: whether its bases were used; one with no replaced block has still consulted them.
        """
        names = (name, *self.originals(name)) if is_target else (name,)
        return self._cost(names, self._charged(names) if is_target else [])

    def _charged(self, names: Collection[str]) -> list[Charge]:
        """All that was charged for those of the variants that are targets, by this call and by earlier ones."""
        targets = self._targets(names)
        return [charge for charge in read_charges(self.work.store.path) if charge.name in targets]

    def _targets(self, names: Collection[str]) -> set[str]:
        return set(names) & set(self.selection.assignments)

    def _cost(self, names: Sequence[str], charges: Sequence[Charge]) -> PublicationCost:
        return cost_of([self.work.variants[name] for name in names], self.work.settings.accountant, charges)
