"""What goes wrong between ranks, by name. Each message says what, with values, and the fix."""


class CommunicationError(RuntimeError):
    """Any failure of messages between ranks."""


class DeadlockError(CommunicationError):
    """No rank can go on: each waits for a message that can no longer come."""


class LimitError(CommunicationError):
    """A rank has waited for another one longer than an operation may."""


class MismatchError(CommunicationError):
    """The two ends of a message, or the ranks of a collective, disagree on what they are doing."""


class RankFailed(CommunicationError):
    """Another rank failed, so this one stops. The other one's error is the one to read."""


class LaunchError(CommunicationError):
    """The program was started in a way that cannot work."""


class QuorumError(CommunicationError):
    """Too few members of a job are left, or can see each other, for it to go on."""
