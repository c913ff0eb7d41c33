"""Load client: sends requests to a server at their times and measures what comes back."""
