"""Pictures of what was traced and measured."""
