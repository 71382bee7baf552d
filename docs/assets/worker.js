// Browsers start no worker for a page that was opened from disk. There, the search's worker runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.addEventListener("load", () => this.ready());
      // The script's messages go to its own window, as a worker's would; `answer` hands them out.
      this.frame.srcdoc =
        '<script>window.answer = null; window.postMessage = data => window.answer(data);</' + 'script>' +
        '<script src="' + new URL(url, location.href) + '"></' + 'script>';
      document.body.append(this.frame);
    }
    ready() {
      const inside = this.frame.contentWindow;
      inside.answer = data => {
        const event = new MessageEvent("message", { data });
        this.dispatchEvent(event);
        if (this.onmessage) this.onmessage(event);
      };
      const waiting = this.waiting;
      this.waiting = null;
      waiting.forEach(data => this.postMessage(data));
    }
    postMessage(data) {
      if (this.waiting) return void this.waiting.push(data);
      this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
    }
    terminate() {
      this.frame.remove();
    }
  };
  window.Worker = window.IFrameWorker;
}
