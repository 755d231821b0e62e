"""The engine of NVFLARE's hello-dp: made once, for the epochs of all rounds."""

import argparse

import nvflare.client as flare
from opacus import PrivacyEngine

parser = argparse.ArgumentParser()
parser.add_argument("--target_epsilon", type=float, default=1.0)
parser.add_argument("--target_delta", type=float, default=1e-5)
args = parser.parse_args()
while flare.is_running():
    input_model = flare.receive()
    if input_model.current_round == 0:
        engine = PrivacyEngine()
        private = engine.make_private_with_epsilon(
            epochs=5 * input_model.total_rounds,
            target_epsilon=args.target_epsilon,
            target_delta=args.target_delta,
            max_grad_norm=1.0,
        )
