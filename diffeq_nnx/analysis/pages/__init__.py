"""Figures given as data, drawn as PNG files and as one interactive page that needs nothing from the network.

`charts` says what a figure is, `png.draw` makes a picture of one, `page.write_page` a page of many. None of them knows
what the numbers mean.
"""
