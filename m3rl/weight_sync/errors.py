"""What can go wrong in a weight sync; every error has one argument, so it survives pickling."""

from m3rl.errors import M3rlError


class SyncError(M3rlError):
    """A weight sync did not do what was asked; the message says where and why."""


class LayoutError(SyncError):
    """A rank's list of tensors contradicts itself or another rank's."""


class PlanError(SyncError):
    """The planned copies would miss, repeat or distort a part of a tensor."""


class RefusedError(SyncError):
    """One side refused to begin: no byte has moved, the replica still holds what it held."""


class TransportError(SyncError):
    """A rank did not join, or a transfer did not finish; the message names who was waited for."""


class NotMappableError(TransportError):
    """Members of a group cannot map one another's memory; another transport may connect them."""


class NonFiniteError(SyncError):
    """A tensor arrived with NaN or infinity in it."""


class VerificationError(SyncError):
    """The replica does not hold the bits that the trainer holds."""


class BusyError(SyncError):
    """Another sync is open; the message names its holder."""


class NotReadyError(SyncError):
    """Too few replicas hold the policy version that is about to be used."""
