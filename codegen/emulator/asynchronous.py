"""Being filled."""
