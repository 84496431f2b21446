"""Settings of unit tests."""

from hypothesis import settings

# A busy machine is not a failure.
settings.register_profile("megappo", deadline=None)
settings.load_profile("megappo")
