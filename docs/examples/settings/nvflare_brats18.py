"""The privacy filter of NVFLARE's BraTS18 job, with the defaults of its command line."""

import argparse

from nvflare.app_common.filters.svt_privacy import SVTPrivacy
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe

parser = argparse.ArgumentParser()
parser.add_argument("--dp_fraction", type=float, default=0.9)
parser.add_argument("--dp_epsilon", type=float, default=21.0)
parser.add_argument("--dp_noise_var", type=float, default=2.0)
parser.add_argument("--num_rounds", type=int, default=600)
args = parser.parse_args()
recipe = FedAvgRecipe(name="brats18", num_rounds=args.num_rounds)
recipe.add_client_output_filter(
    SVTPrivacy(fraction=args.dp_fraction, epsilon=args.dp_epsilon, noise_var=args.dp_noise_var), tasks=["train"]
)
