// Pages opened as files may not fetch one another, so search shows titles without excerpts.
if (location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;

// What the theme leaves out for keyboards and screen readers.
document.querySelector(".sidebar-drawer")?.setAttribute("aria-label", "Site");
document.querySelector(".toc-drawer")?.setAttribute("aria-label", "On this page");
const makeScrollable = () => document.querySelectorAll("article pre, article .table-wrapper").forEach((element) => {
  const pre = element.closest(".highlight") ?? element;  // whichever of them scrolls
  const scrolls = [element, pre].find((box) => box.scrollWidth > box.clientWidth);
  if (scrolls) scrolls.tabIndex = 0;
});
makeScrollable();
addEventListener("resize", makeScrollable);
