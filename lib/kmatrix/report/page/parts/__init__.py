"""What the sections of the page share: configurations with their colours, numbers as text, places in static figures."""
