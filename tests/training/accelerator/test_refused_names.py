"""Names that are there to be imported, and refuse when they are called."""

from __future__ import annotations

import pytest
from structure.parity import refused

import nb_accelerate.utils
from nb_accelerate.compat.refused import Refused, prepare_pippy
from nb_accelerate.errors import ConfigError


@pytest.mark.parametrize("name", refused(), ids=lambda name: name.__name__)
def test_a_name_that_refuses_says_why_and_what_to_write(name: type[Refused]):
    assert getattr(nb_accelerate if name is prepare_pippy else nb_accelerate.utils, name.__name__) is name
    with pytest.raises(ConfigError, match=rf"^{name.__name__} .*\. (Write|Leave) "):
        name("an argument", another=1)
    assert not isinstance(name.reason, name)
