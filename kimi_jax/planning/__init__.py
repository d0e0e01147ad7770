"""What a layout costs and where it puts things, with no device: plan, explain, and the check against the compiler."""
