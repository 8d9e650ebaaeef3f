"""Another place for a request whose engine has failed it."""

from functools import partial

from deepinfer_router.admission import Admission
from deepinfer_router.errors import Refusal
from deepinfer_router.journey import Journey
from deepinfer_router.placement import Placed, Placer, give_back


class Replacement:
    """Finds it, and waits for room there: an engine that is lost leaves the others fuller."""

    def __init__(self, placer: Placer, admission: Admission) -> None:
        self._placer = placer
        self._admission = admission

    async def find(self, journey: Journey) -> Placed | None:
        """None: no engine is left that has not failed it, or none has room in time."""
        work = journey.request.work
        if not self._placer.others(work):
            return None
        try:
            # Its tenant has been charged when it came.
            return await self._admission.admit(work, 0.0, partial(self._placer.place, work, journey.splits), give_back)
        except Refusal:
            return None
