#!/usr/bin/env bash
# From random weights to a folder for transformers and vLLM. Arguments are further overrides of the GRPO run.
set -euo pipefail

rlctl train sft sft-tiny run.name=warm
# The newest checkpoint of the run `warm` is where GRPO starts.
rlctl train grpo grpo-tiny run.name=sums model.path=warm grpo.num_steps=60 "$@"

rlctl eval warm grpo-tiny
rlctl eval sums
rlctl eval --compare warm sums

rlctl export sums sums-hf
