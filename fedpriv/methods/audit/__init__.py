"""Audits: lower bounds of epsilon from what an attacker finds, to hold against the upper bounds of the accounting.

Two hundred canaries, each in the data with probability 1/2, and an attacker whose scores reveal which were included:

>>> import numpy as np
>>> from fedpriv.methods.audit import one_run_audit
>>> included = np.random.default_rng(0).random(200) < 0.5
>>> found = one_run_audit(included.astype(float), included, num_guesses=100)
>>> print(f"{found.num_correct} of {found.num_guesses} right: epsilon is at least {found.epsilon_lower:.2f}")
100 of 100 right: epsilon is at least 3.49
"""

from typing import TYPE_CHECKING

from fedpriv.exports import lazy_exports

if TYPE_CHECKING:
    from fedpriv.learning.training.canaries import AuditedClient as AuditedClient
    from fedpriv.learning.training.canaries import CanaryPlan as CanaryPlan
    from fedpriv.learning.training.canaries import audited_client as audited_client
    from fedpriv.learning.training.canaries import inclusions as inclusions
    from fedpriv.methods.audit._bounds import OneRunAudit as OneRunAudit
    from fedpriv.methods.audit._bounds import clopper_pearson as clopper_pearson
    from fedpriv.methods.audit._bounds import combined_audit as combined_audit
    from fedpriv.methods.audit._bounds import ladder as ladder
    from fedpriv.methods.audit._bounds import num_correct as num_correct
    from fedpriv.methods.audit._bounds import one_run_audit as one_run_audit
    from fedpriv.methods.audit._bounds import one_run_epsilon as one_run_epsilon
    from fedpriv.methods.audit._membership import Membership as Membership
    from fedpriv.methods.audit._membership import calibrated_scores as calibrated_scores
    from fedpriv.methods.audit._membership import lira_scores as lira_scores
    from fedpriv.methods.audit._membership import loss_scores as loss_scores
    from fedpriv.methods.audit._membership import membership as membership
    from fedpriv.methods.audit._membership import plot_roc as plot_roc
    from fedpriv.methods.audit._membership import rmia_scores as rmia_scores
    from fedpriv.methods.audit.black_box import canary_scores as canary_scores
    from fedpriv.methods.audit.black_box import scores_of as scores_of
    from fedpriv.methods.audit.f_dp import AuditPower as AuditPower
    from fedpriv.methods.audit.f_dp import audit_power as audit_power
    from fedpriv.methods.audit.f_dp import gaussian_mu as gaussian_mu
    from fedpriv.methods.audit.f_dp import many_runs_schedule_epsilon as many_runs_schedule_epsilon
    from fedpriv.methods.audit.f_dp import schedule_epsilon as schedule_epsilon
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
