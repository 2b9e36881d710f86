"""Checks of data sets whose rows a library makes from a seed: the library, its data set, its arguments, the seeds."""

from collections.abc import Iterator

from rlctl.config.data_schema import DatasetSection
from rlctl.config.schema import RunConfig
from rlctl.data.datasets import generator_of, shown
from rlctl.preflight.backend import Violation, Violations


def check_generated(config: RunConfig) -> Violations:
    """Find data sets that cannot be made, and held-out rows in training."""
    usable: dict[str, range] = {}
    for key, section in _sections(config):
        made = generator_of(section.path)
        if made is None and section.args:
            what = "are of rows that a library makes, as for the path reasoning_gym:chain_sum, not of those of"
            yield Violation(f"{key}.args", f"{what} {shown(section.path)}", (f"{key}.path",))
        if made is None:
            continue
        generator, name = made
        problems = generator.problems(name, section.args)
        yield from (Violation(f"{key}.{inner}", what, (f"{key}.path",)) for inner, what in problems)
        if not problems:
            usable[key] = generator.seeds(name, section.args)
    held_out = usable.pop("data.validation", range(0))
    sections = dict(_sections(config))
    for key, seeds in usable.items():
        same = sections[key].path == sections["data.validation"].path
        if same and range(max(seeds.start, held_out.start), min(seeds.stop, held_out.stop)):
            own, theirs = (f"{each.start} to {each.stop - 1}" for each in (held_out, seeds))
            what = f"a row has a seed of its own, here {own}, and {theirs} in {key}: rows that are trained on would be "
            what += f"held out; {seeds.stop} is free"
            yield Violation("data.validation.args.seed", what, (f"{key}.args.seed",))


def _sections(config: RunConfig) -> Iterator[tuple[str, DatasetSection]]:
    """Yield (key, section) of every data set; that of data.train where it has no sources."""
    data = config.data
    if not data.train.sources:
        yield "data.train", data.train
    yield from ((f"data.train.sources.{name}", section) for name, section in data.train.sources.items())
    yield "data.validation", data.validation
