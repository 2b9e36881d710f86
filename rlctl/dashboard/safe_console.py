"""The console that everything of rlctl is shown on: of what is printed, no escape but rich's own gets through."""

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from rlctl.utils.escapes import neutral


class SafeConsole(Console):
    """A rich console that neutralises the text it is given."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """See `Console.render`."""
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(neutral(segment.text), segment.style)
