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

// Code can be copied without its prompts and outputs.
for (const pre of document.querySelectorAll("article .cell_input pre, article .highlight:not(.cell_output *) pre")) {
  const button = Object.assign(document.createElement("button"), { type: "button", className: "copy", textContent: "Copy" });
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(pre.innerText.trimEnd());
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  pre.parentElement.append(button);
}

// The race on the home page runs once; the button runs it again.
const race = document.querySelector(".race");
document.querySelector(".start button")?.addEventListener("click", () => {
  for (const veil of race.querySelectorAll(".veil")) veil.animate({ transform: ["none", "scaleX(0)"] }, 5000);
});

// A page has no kernel, so the dots of `guess = ...` become a field. The answer then repeats what the reader wrote in it.
const NOT_YET = /You have not guessed yet: write .+? in the cell above\./g;
for (const code of document.querySelectorAll("article .cell_input pre")) {
  if (!/^guess\w* = \.\.\./.test(code.textContent)) continue;
  const answer = code.closest(".cell").nextElementSibling;
  const output = [...answer.querySelectorAll(".cell_output pre")].find((pre) => pre.textContent.search(NOT_YET) >= 0);
  if (!output) continue;  // the lesson stopped before it
  const printed = output.textContent;
  const fields = [...code.querySelectorAll("span")].filter((span) => span.textContent === "...").map((dots) => {
    const unit = dots.nextElementSibling?.textContent.replace("#", "") ?? "";
    const field = Object.assign(document.createElement("input"), { className: "guess", placeholder: "...", autocomplete: "off" });
    field.setAttribute("aria-label", `Your guess:${unit}`);
    field.inputMode = printed.includes("write a number") ? "decimal" : "text";
    dots.replaceWith(field);
    return field;
  });
  code.addEventListener("input", () => {
    let number = 0;
    output.textContent = printed.replace(NOT_YET, (sentence) => {
      const guess = fields[number++].value.trim();
      return guess ? `You guessed ${guess}.` : sentence;
    });
  });
  code.addEventListener("keydown", (event) => {
    if (event.key === "Enter") output.closest("details").open = true;
  });
}
