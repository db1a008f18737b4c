"""Charts given as data, drawn as PNG files and on one interactive page that needs no network.

`charts` defines the data, `png.draw` writes one chart as a picture, and `page.write_page` writes a page of many.
"""
