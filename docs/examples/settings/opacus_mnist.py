"""Opacus' example of MNIST, with the defaults of its command line."""

import argparse

from opacus import PrivacyEngine

parser = argparse.ArgumentParser()
parser.add_argument("-b", "--batch-size", type=int, default=64)
parser.add_argument("-n", "--epochs", type=int, default=10)
parser.add_argument("--sigma", type=float, default=1.0)
parser.add_argument("--delta", type=float, default=1e-5)
args = parser.parse_args()
private = PrivacyEngine().make_private(noise_multiplier=args.sigma, max_grad_norm=1.0)
