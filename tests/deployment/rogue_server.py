"""A ServerApp that asks for what no node should give, then repeats an honest request; a bundle of its own holds it.

It writes what the nodes answered to answers.json in the run's folder.
"""

import json
from dataclasses import replace
from pathlib import Path

from flwr.serverapp import ServerApp

from fedpriv.config import parse
from fedpriv.holder.wire import kinds
from fedpriv.holder.wire.frame import TRAIN, Request
from fedpriv.learning.training.local_update import UpdateSpec
from fedpriv.learning.training.workbench import workbench
from server.exchange import digest_of, message_to, wire_bytes
from server.registration import register_nodes

app = ServerApp()

NUM_REPEATS = 10


@app.main()
def main(grid, context):
    config = parse(context.run_config)
    initial = workbench(config).initial
    nodes = register_nodes(grid, num_expected=config.num_clients, wait=120)
    honest = UpdateSpec.of(config)
    lies = {
        "noise_multiplier": replace(honest, noise_multiplier=0.0),
        "local_steps": replace(honest, local_steps=100 * honest.local_steps),
        "clip_norm": replace(honest, clip_norm=1e9),
        "learning_rate": replace(honest, learning_rate=1e24),
    }

    def message(node_id, spec):
        fields, arrays = kinds.pack_instruction("rogue", 1, spec), {name: t.numpy() for name, t in initial.items()}
        return message_to(node_id, Request.of(TRAIN, fields=fields, arrays={kinds.ADAPTER: arrays}), 1)

    answers = {"lies": {}, "replays": []}
    for name, spec in lies.items():
        sent = [message(node_id, spec) for node_id, _ in nodes.values()]
        replies = list(grid.send_and_receive(sent, timeout=240))
        answers["lies"][name] = [reply.error.reason if reply.has_error() else "released" for reply in replies]
    first = nodes[0][0]
    replies = list(grid.send_and_receive([message(first, honest) for _ in range(NUM_REPEATS)], timeout=400))
    for reply in replies:
        answers["replays"].append({"sha256": digest_of(reply), "bytes": wire_bytes(reply.content)})
    out = Path(config.out)
    out.mkdir(parents=True)
    (out / "answers.json").write_text(json.dumps(answers))
