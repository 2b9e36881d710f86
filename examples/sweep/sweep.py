"""Learning rates compared: one run each, one after the other in one program. Arguments are further overrides."""

import sys

import rlctl

RATES = (1e-4, 3e-4, 1e-3)


def overrides_of(rate: float) -> list[str]:
    """Return the overrides of the run with a learning rate."""
    return [f"run.name=lr-{rate:g}", f"trainer.optimizer.lr={rate}", "grpo.num_steps=40", *sys.argv[1:]]


def main() -> None:
    # A mistake is told before the first run, not after hours.
    for rate in RATES:
        rlctl.check("grpo-tiny", overrides_of(rate))
    accuracies = {}
    for rate in RATES:
        run = rlctl.train("grpo-tiny", overrides_of(rate), log=None)
        accuracies[rate] = run.validations.column("validation/accuracy")[-1]
        print(f"{run.name}: {accuracies[rate]:.3f}", flush=True)
    best_rate = max(accuracies, key=lambda rate: accuracies[rate])
    print(f"best: trainer.optimizer.lr={best_rate:g}")


if __name__ == "__main__":
    main()
