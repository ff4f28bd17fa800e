"""The engine of Ray where Ray is not installed. What needs it is in tests/with_ray."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from nb_accelerate.base.config.engine import EngineOptions
from nb_accelerate.errors import MissingDependencyError
from nb_accelerate.notebook.launch.engines import open_engine


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_the_package_to_install_is_named() -> None:
    with pytest.raises(MissingDependencyError, match=r"engine='ray' needs.*pip install"):
        open_engine(EngineOptions(engine="ray"))
