"""An NVFLARE task-result filter: the vault's noised update leaves a site in place of the one that its trainer made.

A site lists it in the default scope of its own `local/privacy.json`, where no job can leave it out:

    {"scopes": [{"name": "vault", "task_result_filters": [
        {"path": "vault_filter.VaultFilter", "args": {"socket": "/srv/node/updates.sock"}}]}],
     "default_scope": "vault"}
"""

from __future__ import annotations

from pathlib import Path

from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.dxo_filter import DXOFilter
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.app_common.app_constant import AppConstants

from fedpriv.vault import release_update


class VaultFilter(DXOFilter):
    """Sends a result's weight difference to the vault, and lets the vault's answer leave, and nothing else.

    Other kinds of data, metadata (such as numbers of steps) and headers are dropped: no epsilon covers them. A result
    without one weight difference becomes an error without content.

    Args:
        socket: the vault's socket for updates.
        retry_seconds: for how long to look for a vault that does not listen.
    """

    def __init__(self, socket: str, retry_seconds: float = 60.0) -> None:
        super().__init__([DataKind.WEIGHT_DIFF], None)
        self._socket, self._retry_seconds, self._num_results = Path(socket), retry_seconds, 0

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """A new result with the vault's answer alone."""
        try:
            dxo = from_shareable(shareable)
            result = self.process_dxo(dxo, shareable, fl_ctx) if dxo.data_kind == DataKind.WEIGHT_DIFF else None
        except Exception as error:
            self.log_error(fl_ctx, f"no update leaves: {error}")
            result = None
        return make_reply(ReturnCode.EXECUTION_RESULT_ERROR) if result is None else result.to_shareable()

    def process_dxo(self, dxo: DXO, shareable: Shareable, fl_ctx: FLContext) -> DXO:
        """The noised weight difference, released for the job and the round that the result tells, else its number.

        Both are labels in the ledger: two different updates are two charges, whatever round they are for.
        """
        self._num_results += 1
        told = shareable.get_header(AppConstants.CURRENT_ROUND)
        round_ = told if type(told) is int else self._num_results
        released = release_update(
            self._socket, fl_ctx.get_job_id(), round_, dxo.data, retry_seconds=self._retry_seconds
        )
        return DXO(DataKind.WEIGHT_DIFF, data=released)
