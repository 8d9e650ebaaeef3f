"""Another place for a request whose engine has failed it."""

from functools import partial

from deepinfer_router.admission import Admission
from deepinfer_router.journey import Journey
from deepinfer_router.placement import Placed, Placer, give_back
from deepinfer_router.roles import Role


class Replacement:
    """Finds it, and waits for room there: an engine that is lost leaves the others fuller."""

    def __init__(self, placer: Placer, admission: Admission) -> None:
        self._placer = placer
        self._admission = admission

    async def find(self, journey: Journey) -> Placed | None:
        """None: no engine is left that has not failed it. Raises Refusal: none of those has room in time."""
        work, placer = journey.request.work, self._placer
        generates = journey.request.api.generates
        place = partial(placer.place, work, journey.splits) if generates else partial(placer.any, work)
        if not placer.others(work, (Role.DECODE,) if generates else (Role.PREFILL, Role.DECODE)):
            return None
        # Its tenant has been charged when it came.
        return await self._admission.admit(work, 0.0, place, give_back)
