"""A ServerApp that asks for what no node should give, then repeats an honest request; a bundle of its own holds it.

It writes what the nodes answered to answers.json in the run's folder.
"""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import torch
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp

from fedpriv.config import parse
from fedpriv.holder.wire import protocol
from fedpriv.holder.wire.carrier import unpacked
from fedpriv.learning.training.local_update import UpdateSpec
from fedpriv.learning.training.workbench import workbench
from server.exchange import records_of, wire_bytes
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
        content = {
            **records_of({protocol.ADAPTER: initial}),
            protocol.INSTRUCTION: ConfigRecord(protocol.pack_instruction("rogue", 1, spec)),
        }
        return Message(RecordDict(content), node_id, "train", group_id="1")

    answers = {"lies": {}, "replays": []}
    for name, spec in lies.items():
        sent = [message(node_id, spec) for node_id, _ in nodes.values()]
        replies = list(grid.send_and_receive(sent, timeout=240))
        answers["lies"][name] = [reply.error.reason if reply.has_error() else "released" for reply in replies]
    first = nodes[0][0]
    replies = list(grid.send_and_receive([message(first, honest) for _ in range(NUM_REPEATS)], timeout=400))
    for reply in replies:
        release = protocol.unpack(protocol.UploadRelease, reply.content.config_records[protocol.RELEASE])
        arrays = {key: torch.from_numpy(a) for key, a in unpacked(reply.content[protocol.ADAPTER]).items()}
        answers["replays"].append(
            {
                "sha256": hashlib.sha256(protocol.pack_reply(release, arrays)).hexdigest(),
                "bytes": wire_bytes(reply.content),
            }
        )
    out = Path(config.out)
    out.mkdir(parents=True)
    (out / "answers.json").write_text(json.dumps(answers))
